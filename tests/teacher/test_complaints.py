"""What peers do wrong is said, and does not fill the disk."""

from __future__ import annotations

import logging

import pytest

from teacher.complaints import BURST, MAX_CHARS, Complaints

LOGGER = logging.getLogger("tests.complaints")


def test_a_flood_is_cut_short_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(LOGGER)
    for number in range(1000):
        complaints.say(f"bad frame {number}", now_s=100.0)
    assert [record.getMessage() for record in caplog.records] == [f"bad frame {number}" for number in range(BURST)]
    complaints.say("another", now_s=101.5)
    assert caplog.records[-1].getMessage() == f"another ({1000 - BURST} like it were left out)"
    complaints.say("one more", now_s=101.6)
    complaints.say("yet another", now_s=102.6)
    assert caplog.records[-1].getMessage() == "yet another (1 like it were left out)"


def test_a_long_line_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(LOGGER, level=logging.INFO)
    with caplog.at_level(logging.INFO):
        complaints.say("x" * 4096, now_s=0.0)
    assert caplog.records[-1].getMessage() == "x" * MAX_CHARS + "..."
    assert caplog.records[-1].levelno == logging.INFO


def test_what_is_rare_is_always_said(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(LOGGER)
    for number in range(10 * BURST):
        complaints.say(f"rare {number}", now_s=number * 1.0)
    assert len(caplog.records) == 10 * BURST
