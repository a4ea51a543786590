"""The transport contract of ucx over verbs. Over rc it ran beside the tests of whole runs, on a cable of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.rdma.devices import CONTRACT, RC, RUNS, UD
from tests.rdma.forks import Forked

Say = Callable[[str], None]
StartSuite = Callable[..., Forked]
#: What the whole suite sends at the least: T6 alone is 16 fills of 4 MiB.
SUITE_BYTES = 64 << 20
#: Only ends a suite that hangs, a little before pytest ends the test that waits for it.
SUITE_GUARD_S = 880.0


def check(suite: Forked, say: Say, what: str) -> None:
    """It passed, and nothing of it was skipped."""
    code = suite.wait(guard_s=SUITE_GUARD_S)
    assert code == 0, suite.log[-8000:]
    summary = suite.output.strip().splitlines()[-1].strip("= ")
    say(f"the contract over {what}: {summary}")
    assert re.match(r"\d+ passed", summary), summary
    assert "skipped" not in summary


def test_the_contract_holds_over_rc_and_its_bytes_are_sent_by_the_devices(contract_over_rc: Forked, say: Say) -> None:
    check(contract_over_rc, say, "rc")
    sent = CONTRACT.sent()  # nothing else used that cable
    say(f"the contract over rc: {sent}")
    assert sent.holds(SUITE_BYTES)
    say("slowest tests:\n" + "\n".join(line for line in contract_over_rc.output.splitlines() if "s call " in line))


@dataclass(frozen=True)
class SmallerSuites:
    over_ud: Forked
    under_loss: Forked


@pytest.fixture(scope="module")
def smaller(start_suite: StartSuite) -> Iterator[SmallerSuites]:
    """Both at a time, as the machine has two processors; nothing else uses the cables any more."""
    with RUNS.disturbed("loss", "1%"):
        yield SmallerSuites(
            over_ud=start_suite(CONTRACT, UD, "-k", "test_t1 or test_t5 or test_t9_a_payload"),
            under_loss=start_suite(RUNS, RC, "-k", "test_t1_payload or test_t5_the_source"),
        )


def test_payloads_and_fences_hold_over_ud(smaller: SmallerSuites, say: Say) -> None:
    check(smaller.over_ud, say, "ud")


def test_payloads_are_intact_when_one_packet_in_a_hundred_is_lost(smaller: SmallerSuites, say: Say) -> None:
    check(smaller.under_loss, say, "rc, one packet in a hundred lost")
