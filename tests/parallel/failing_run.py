"""Two ranks train until one of them fails; run by torchrun from `test_failure.py`.

failing_run.py raise   rank 1 raises while rank 0 waits for it in a collective
failing_run.py block   rank 1 raises while rank 0 waits for something that never ends
failing_run.py first   the same with rank 0, on which the ranks' store lies
failing_run.py hang    rank 1 stops answering

A second argument, cuda, runs it on two GPUs; copies, too, with tensor parallelism by copy engines
instead of a pipeline.
"""

import sys
import time

from megadiff.training.engine import NativeEngine
from megadiff.training.errors import run
from megadiff.training.setup import start
from megadiff.training.stop import StopRequests
from tests.parallel.parity import Cell, config_of, micro_batches_of


def main(argv: list[str]) -> None:
    how, where = argv[0], (argv[1:] or ["cpu"])[0]
    device = "cpu" if where == "cpu" else "cuda"
    cell = Cell(pipeline="2", device=device)
    if where == "copies":
        cell = Cell(tensor=2, sequence=True, overlap=True, device=device)
    config = config_of(cell)
    if how == "hang":
        # NCCL connects at the first message, which takes seconds
        config.parallel.distributed_timeout_minutes = 0.25 if device == "cuda" else 0.05
    failing = 0 if how == "first" else 1
    env = start(config)
    engine = NativeEngine(config, env)
    with StopRequests.install(config.training):  # torchrun's signal alone does not end a rank
        for step in range(3):
            if step == 2 and env.mesh.rank == failing:
                print(f"failing at {time.time():.2f}", flush=True)
                if how == "hang":
                    time.sleep(600 if device == "cuda" else 15)
                raise RuntimeError(f"injected on rank {failing}")
            while step == 2 and how in ("block", "first"):
                time.sleep(1)
            engine.forward_backward(micro_batches_of(cell, step, 0), 50)
            engine.step(0.01, 0.1).grad_norm.item()  # waits for the device, as a log line does


if __name__ == "__main__":
    run(main, sys.argv[1:])
