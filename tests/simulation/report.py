"""What is said of a run: how it ended, or how it failed, with the command that replays it and the faults it takes."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.simulation.clock import Violation
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.world import Outcome, World

#: Runs spent on leaving faults out.
MAX_SHRINK_RUNS = 80


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that broke a promise. `kind`: what it has in common with its shrunk versions."""

    what: Scenario
    kind: str
    text: str

    def __str__(self) -> str:
        what = self.what
        faults = "\n".join(f"  {fault}" for fault in what.faults) or "  none"
        doom = "" if what.doom is None else f"\n  t={what.doom_s:.3f} {what.doom.value}: {_names(what)} for good"
        return (
            f"{self.text}\n"
            f"replay: python -m tests.simulation --seed {what.seed} --trace\n"
            f"the faults that it takes, of those of the seed:\n{faults}{doom}"
        )


def try_scenario(
    what: Scenario, *, log: Callable[[str], None] | None = None, shrinks: bool = True
) -> Outcome | Failure:
    """Run it; a failure comes with as few of its faults as were found to be enough."""
    try:
        return World(what, log=log).run()
    except Violation as violation:
        failure = Failure(what=what, kind="violation", text=str(violation))
    except Exception as error:  # noqa: BLE001 - whatever a machine raised is a failure of this seed
        text = "".join(traceback.format_exception(error)[-6:])
        failure = Failure(what=what, kind=type(error).__name__, text=text)
    return shrink(failure) if shrinks else failure


def shrink(failure: Failure) -> Failure:
    """Leave out faults, halves first, as long as it fails in the same way."""
    left, size = MAX_SHRINK_RUNS, max(1, len(failure.what.faults) // 2)
    while size:
        begin = 0
        while begin < len(failure.what.faults) and left:
            smaller = _without(failure.what, failure.what.faults[begin : begin + size])
            result = try_scenario(smaller, shrinks=False)
            left -= 1
            if isinstance(result, Failure) and result.kind == failure.kind:
                failure = result
            else:
                begin += size
        size //= 2
    return failure


def _names(what: Scenario) -> str:
    return ", ".join(f"r{i}" for i in what.doomed)


def _without(what: Scenario, faults: Sequence[Fault]) -> Scenario:
    return dataclasses.replace(what, faults=tuple(fault for fault in what.faults if fault not in faults))
