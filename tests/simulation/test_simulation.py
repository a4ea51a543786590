"""Whole runs in virtual time, a scenario a seed: every invariant holds after every event, and each run ends as it must.

A failure says how to replay it. `make soak` tries seeds that nobody has seen.
"""

from __future__ import annotations

from collections import Counter

import pytest

from ring.core.stats import DropCause, RetryCause
from tests.seeds import seeds
from tests.simulation.__main__ import main
from tests.simulation.report import Failure, try_scenario
from tests.simulation.scenario import FaultKind, scenario
from tests.simulation.world import World

FAST_SEEDS = range(100)
#: Tens of a hundred: beyond the fast ones, and others for every master seed.
SLOW_HUNDREDS = [100 * (1 + number) for number in seeds(10)]
#: Once failed: docs/lab-log.md says why.
MENDED_SEEDS = (1795985024386, 1795985883995, 1795990934889, 1795991444937)


def met_over(seeds: range) -> Counter[str]:
    """Run the seeds; what befell them, and how often. Fails with the first failures, told in full."""
    met: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        result = try_scenario(scenario(seed))
        if isinstance(result, Failure):
            failures.append(f"seed {seed}: {result}")
        else:
            met += result.met
        if len(failures) == 3:
            break
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
    return met


def test_every_invariant_holds_in_a_hundred_runs_that_meet_every_fault() -> None:
    met = met_over(FAST_SEEDS)
    wanted = {
        *(kind.value for kind in FaultKind),
        *(f"retry: {cause.value}" for cause in RetryCause),
        *(f"drop: {cause.value}" for cause in DropCause),
        "a given-up fill was written",
        "lost for good",
        "lost, and started again",
        "lost with all slots in quarantine",
        "resumed",
        "replica drained",
    }
    assert wanted <= set(met), f"never met: {sorted(wanted - set(met))}"


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW_HUNDREDS)
def test_every_invariant_holds_in_a_thousand_more_runs(first: int) -> None:
    met_over(range(first, first + 100))


@pytest.mark.parametrize("seed", MENDED_SEEDS)
def test_what_failed_once_holds(seed: int) -> None:
    met_over(range(seed, seed + 1))


def test_a_seed_means_the_same_run_every_time() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        World(scenario(7), log=log.append).run()
    assert logs[0] == logs[1]
    assert len(logs[0]) > 100


def test_the_soak_tries_seeds_until_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first", "0", "--minutes", "0.005"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[1:3] == ["seeds", "hold:"]
