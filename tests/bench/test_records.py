"""What a bench writes down, and when it fails."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

import bench.records as records
from bench.records import Check, Record, Spread, git_sha, write_record
from bench.report import console, exit_code, figure, print_checks, print_spreads
from ring.core.errors import ConfigError, LocalProtocolError


def record(**changes: object) -> Record:
    fields: dict[str, object] = {
        "bench": "test",
        "case": "one",
        "settings": {"rows": 4},
        "measured": {"step_s": Spread.of([0.1, 0.3, 0.2])},
        "bytes_moved": 64,
        "checks": (Check(name="ratio", measured=1.3, target=1.1, limit=1.25),),
    }
    return Record(**(fields | changes))  # type: ignore[arg-type]


def test_a_spread_holds_the_median_and_percentiles() -> None:
    spread = Spread.of([float(value) for value in range(100, -1, -1)])
    assert spread == Spread(num=101, low=0, p10=10, median=50, p90=90, high=100)
    assert Spread.of([7.0]) == Spread(num=1, low=7, p10=7, median=7, p90=7, high=7)


def test_nothing_measured_is_no_spread() -> None:
    with pytest.raises(LocalProtocolError, match="no measurement"):
        Spread.of([])


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (Check(name="x", measured=9.0), "reported"),
        (Check(name="x", measured=1.10, target=1.10, limit=1.25), "met"),
        (Check(name="x", measured=1.11, target=1.10, limit=1.25), "missed"),
        (Check(name="x", measured=1.25, target=1.10, limit=1.25), "missed"),
        (Check(name="x", measured=1.26, target=1.10, limit=1.25), "failed"),
        (Check(name="x", measured=99.0, target=1.10), "missed"),
        (Check(name="x", measured=0.80, target=0.80, limit=0.5, at_most=False), "met"),
        (Check(name="x", measured=0.79, target=0.80, limit=0.5, at_most=False), "missed"),
        (Check(name="x", measured=0.49, target=0.80, limit=0.5, at_most=False), "failed"),
        (Check(name="x", measured=math.nan, target=1.10, limit=1.25), "failed"),
        (Check(name="x", measured=math.nan, target=0.80, limit=0.5, at_most=False), "failed"),
    ],
)
def test_a_figure_fails_only_beyond_its_limit_and_a_nan_always(check: Check, verdict: str) -> None:
    assert check.verdict == verdict
    assert exit_code([Check(name="fine", measured=1.0), check]) == (1 if verdict == "failed" else 0)


def test_records_are_lines_of_json_that_say_which_code_on_which_machine(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "bench"
    assert write_record(record(case="one"), directory=directory) == directory / "test.jsonl"
    write_record(record(case="two", bytes_moved=65), directory=directory)
    lines = [json.loads(line) for line in (directory / "test.jsonl").read_text().splitlines()]
    assert [(line["case"], line["bytes_moved"]) for line in lines] == [("one", 64), ("two", 65)]
    for line in lines:
        assert line["measured"]["step_s"]["median"] == 0.2
        assert line["checks"][0]["verdict"] == "failed"
        assert line["git_sha"] == git_sha()
        assert line["versions"]["torch"].count(".") >= 2
        assert line["cpu"]
        assert line["time_utc"].endswith("+00:00")


def test_a_record_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"test\.jsonl can't be written"):
        write_record(record(), directory=tmp_path / "file")


def _commit(root: Path, text: str) -> str:
    (root / "bench").mkdir(parents=True, exist_ok=True)
    (root / "bench" / "records.py").write_text(text)
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "bench/records.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def test_the_sha_says_whether_the_code_was_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha = _commit(tmp_path, "original")
    monkeypatch.setattr(records, "__file__", str(tmp_path / "bench" / "records.py"))
    assert git_sha() == sha
    (tmp_path / "bench" / "records.py").write_text("changed")
    assert git_sha() == sha + "+"


def test_code_in_somebody_elses_git_tree_has_no_sha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _commit(tmp_path, "theirs")
    installed = tmp_path / "site-packages" / "bench" / "records.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("ours, not tracked there")
    monkeypatch.setattr(records, "__file__", str(installed))
    assert git_sha() is None


def test_tables_show_each_figure_beside_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    out = console()
    print_checks(out, "title", [Check(name="stall", measured=0.062, unit="frac", target=0.05)])
    print_spreads(out, "title", [("step", "s", Spread.of([0.01234]))])
    printed = capsys.readouterr().out
    for text in ("6.2%", "<= 5.0%", "missed", "12.34 ms"):
        assert text in printed


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.012, "s", "12.00 ms"),
        (1.5, "s", "1.50 s"),
        (0.5, "frac", "50.0%"),
        (2, "GB/s", "2.000 GB/s"),
        (1, "", "1.000"),
    ],
)
def test_figures_carry_their_unit(value: float, unit: str, text: str) -> None:
    assert figure(value, unit) == text
