"""Run the simulation by hand: ``python tests/simulation/run.py --seeds 0-999``, or again what failed: ``--seed 17 --trace``."""

from __future__ import annotations

import argparse
import sys
import time

from simulation import DEFAULT_STEPS, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--seeds", default="0-9", help="A-B: all from A to B")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="switches with faults and load")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with further seeds for so long")
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seed, end = (options.seed, options.seed) if options.seed is not None else (int(first), int(last or first))
    began, failed, steps, runs, checks = time.monotonic(), 0, 0, 0, 0
    longest: dict[str, float] = {}
    while seed <= end or time.monotonic() - began < 60 * options.minutes:
        outcome = simulate(seed, options.steps, trace=print if options.trace else None)
        steps, runs, checks = steps + outcome.steps, runs + 1, checks + outcome.checks
        if outcome.violation is not None:
            failed += 1
            print(outcome.report(), flush=True)
        elif options.seed is not None:
            print(outcome)
        seed += 1
        for what, seconds in outcome.longest.items():
            longest[what] = max(seconds, longest.get(what, 0.0))
    took = time.monotonic() - began
    print("longest calls:", ", ".join(f"{what} {seconds:.2f} s" for what, seconds in sorted(longest.items())))
    print(f"{runs} seeds, {steps} steps, {checks} checks, {failed} failed, {took:.1f} s ({steps / took:.0f} steps/s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
