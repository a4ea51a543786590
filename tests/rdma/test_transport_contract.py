"""The transport contract of ucx over verbs. Over rc it ran beside the tests of whole runs, on a cable of its own."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.rdma.devices import CONTRACT, RC, RUNS, UD
from tests.rdma.forks import Forked

Say = Callable[[str], None]
StartSuite = Callable[..., Forked]
#: What the whole suite sends at the least: T6 alone is 16 fills of 4 MiB.
SUITE_BYTES = 64 << 20


def check(suite: Forked, say: Say, what: str) -> None:
    """It passed, and nothing of it was skipped."""
    code = suite.wait()
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


def test_payloads_and_fences_hold_over_ud(start_suite: StartSuite, say: Say) -> None:
    check(start_suite(CONTRACT, UD, "-k", "test_t1 or test_t5 or test_t9_a_payload"), say, "ud")


def test_payloads_are_intact_when_one_packet_in_a_hundred_is_lost(start_suite: StartSuite, say: Say) -> None:
    with RUNS.disturbed("loss", "1%"):
        suite = start_suite(RUNS, RC, "-k", "test_t1_payload or test_t5_the_source")
        check(suite, say, "rc, 1 % of packets lost")
