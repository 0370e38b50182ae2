"""Pretrain a Differential Transformer: `torchrun ... pretrain_diff.py --config FILE [flags]`.

Runs alone as well. `--help` lists the flags.
"""

import sys

from megadiff.training.errors import run
from megadiff.training.pretrain import main

if __name__ == "__main__":
    run(main, sys.argv[1:])
