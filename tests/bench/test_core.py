"""The bench of the state machines runs, measures what it says, and fails where the cost of a fill grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.bench_core as bench_core
from bench.bench_core import BASE_SIZE, WAYS, Costs, main
from bench.core_fleet import CoreFleet


def test_the_quick_bench_measures_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "core.png"
    assert main(["--quick", "--out", str(tmp_path), "--plot", str(picture)]) == 0
    record = json.loads((tmp_path / "core.jsonl").read_text())
    assert record["measured"]["one student, 20: cpu_s"]["median"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(way in printed for way in WAYS)


@pytest.mark.parametrize(("growth", "code"), [(1.0, 0), (2.0, 0), (3.5, 1)])
def test_it_fails_where_a_fill_costs_more_with_more_replicas(
    growth: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(sizes: tuple[int, ...], *, fills: int, rounds: int) -> Costs:
        return {(way, size): [1e-4 if size <= BASE_SIZE else growth * 1e-4] for way in WAYS for size in sizes}

    monkeypatch.setattr(bench_core, "measure", measure)
    assert main(["--fills", "10", "--out", str(tmp_path)]) == code


def test_every_student_of_a_fleet_is_served_by_all_its_replicas() -> None:
    fleet = CoreFleet(num_students=6, num_replicas=6, links=3)
    fleet.run(600)
    for machine in fleet.students:
        stats = machine.stats(now_s=fleet.now_s)
        assert stats.released >= 60
        assert stats.retries == stats.drops == 0
        assert all(replica.fills >= 10 for replica in stats.replicas)


@pytest.mark.parametrize("flag", ["--rounds", "--fills"])
def test_a_number_out_of_range_is_one_line_and_exit_2(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, "0"]) == 2
    assert capsys.readouterr().err == f"bench.core: error: {flag} must be >= 1, got 0\n"
