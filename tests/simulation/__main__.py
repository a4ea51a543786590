"""`python -m tests.simulation --seed N [--trace]` replays one seed; `--minutes M` looks for new ones that fail.

A seed that fails is told with the faults it takes: those without which it doesn't fail are left out first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulation.report import Failure, try_scenario
from tests.simulation.scenario import scenario


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--trace", action="store_true", help="print every action and fault of the replay")
    parser.add_argument("--first", type=int, default=None, help="first seed to try (default: by the time of day)")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to try seeds")
    options = parser.parse_args(argv)
    if options.seed is not None:
        result = try_scenario(scenario(options.seed), log=print if options.trace else None)
        print(result)
        return int(isinstance(result, Failure))
    first = int(time.time()) * 1000 if options.first is None else options.first
    return _soak(first, options.minutes)


def _soak(first: int, minutes: float) -> int:
    end_s = time.monotonic() + 60 * minutes
    seed, fills, events = first, 0, 0
    print(f"seeds from {first} on, for {minutes:g} minutes", flush=True)
    while time.monotonic() < end_s:
        result = try_scenario(scenario(seed))
        if isinstance(result, Failure):
            print(result)
            return 1
        fills, events, seed = fills + result.fills, events + result.num_events, seed + 1
    print(f"{seed - first} seeds hold: {fills} fills, {events} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
