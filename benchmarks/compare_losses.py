#!/usr/bin/env python3
"""How far the losses of runs lie from those of one of them, against the spread of others.

python benchmarks/compare_losses.py runs/x one_4 --spread one_2 one_1 --of tp8 dp8

Every name is a folder of runs/x with a metrics.jsonl. The spread is what runs that differ in the
order of their sums alone are apart; runs `--of` that lie further than twice as far (or than 0.5 %
where no spread is given) end this program with code 1.
"""

import argparse
import json
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("reference")
    parser.add_argument("--spread", nargs="+", default=[])
    parser.add_argument("--of", nargs="+", required=True)
    args = parser.parse_args()
    reference = losses(args.folder / args.reference)
    spread = [apart(losses(args.folder / name), reference) for name in args.spread]
    bar = 2 * max(spread) if spread else 0.005
    print(f"{args.folder}, {len(reference)} steps, last loss {list(reference.values())[-1]:.4f}")
    for name, difference in zip(args.spread, spread, strict=True):
        print(f"  {name:20} {difference:.2e} from {args.reference}")
    failed = False
    for name in args.of:
        found = losses(args.folder / name)
        if found.keys() != reference.keys():
            sys.exit(f"error: {name} has steps {sorted(found)}, the reference {sorted(reference)}")
        difference = apart(found, reference)
        failed |= difference > bar
        print(f"  {name:20} {difference:.2e}{'  too far' if difference > bar else ''}")
    sys.exit(int(failed))


def losses(run: Path) -> dict[int, float]:
    """The loss of every step."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    steps = {e["iteration"]: e["lm_loss"] for e in entries if e["kind"] == "train"}
    return dict(sorted(steps.items()))


def apart(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest relative difference at any step."""
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in b if step in a)


if __name__ == "__main__":
    main()
