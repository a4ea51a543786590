"""`python -m bench ranks`: it runs, its record says what was measured, and CPU time that grows with ranks fails it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.bench_ranks import RanksBenchConfig, checks_of_rings, checks_of_steps, main
from bench.ranks_ring import RingCase, RingTimes
from bench.ranks_step import LOSS_WAYS, STEP_WAYS, Times
from bench.report import exit_code

ALONE, MANY = RingCase(ranks=1, replicas=1), RingCase(ranks=4, replicas=8)
FILL = RingTimes(fills_per_s=1000.0, stall_frac=0.5, trainer_cpu_s=4e-4, teacher_cpu_s=7e-4)


@pytest.mark.slow
def test_steps_losses_and_rings_of_several_ranks_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--rows", "64", "--hidden-size", "64", "--vocab-size", "1000", "--batch-size", "2", "--quick"]
    picture = tmp_path / "ranks.png"
    # Of one round of 20 fills no ratio says anything: one beyond its limit is no failure of this test.
    assert main([*small, "--out", str(tmp_path), "--plot", str(picture)]) in (0, 1)
    (record,) = map(json.loads, (tmp_path / "ranks.jsonl").read_text().splitlines())
    assert record["settings"]["ranks"] == 2
    measured = record["measured"]
    assert {f"{way}: s" for way in (*LOSS_WAYS, *STEP_WAYS)} <= measured.keys()
    assert all(spread["median"] > 0 for name, spread in measured.items() if name.endswith(("_s", ": s")))
    assert 0 < measured["2 x 2: stall_frac"]["median"] < 1
    assert record["bytes_moved"] == (1 + 2) * 20 * 64 * 64 * 2
    assert "step, fsdp / apart: time" in capsys.readouterr().out
    assert picture.stat().st_size > 0


def test_cpu_time_of_a_fill_that_grows_with_ranks_and_replicas_fails_the_bench() -> None:
    """Ratios are taken within rounds: a round in which all was slow says nothing of the case."""
    flat = {ALONE: [FILL, replace(FILL, trainer_cpu_s=4e-3)], MANY: [FILL, replace(FILL, trainer_cpu_s=4e-3)]}
    assert exit_code(checks_of_rings(flat)) == 0
    for side in ("trainer_cpu_s", "teacher_cpu_s"):
        grown = {ALONE: [FILL], MANY: [replace(FILL, **{side: 2.1 * getattr(FILL, side)})]}
        (failed,) = (check for check in checks_of_rings(grown) if check.verdict == "failed")
        assert failed.name == f"4 x 8: CPU of a fill, {side.partition('_')[0]}"


def test_an_exchange_is_held_against_the_same_work_without_one() -> None:
    times = {way: [Times(1.0, 1.0)] for way in (*LOSS_WAYS, *STEP_WAYS)} | {"apart": [Times(0.5, 1.0)]}
    checks = {check.name: check for check in checks_of_steps(RanksBenchConfig(), times)}
    assert checks["step, fsdp / apart: time"].measured == 2.0
    assert checks["step, fsdp / apart: time"].verdict == "missed"
    assert checks["step, fsdp / alone: time"].verdict == "reported"


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--ranks", "1"], "--ranks must be >= 2, got 1"),
        (["--batch-size", "3"], "--batch-size 3: allowed: a multiple of the 2 ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused(flags: list[str], refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert refusal in capsys.readouterr().err
