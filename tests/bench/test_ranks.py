"""`python -m bench ranks`, quickly: it runs, and its record says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.bench_ranks import main


@pytest.mark.slow
def test_the_loss_and_the_rings_of_several_ranks_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--rows", "64", "--hidden-size", "64", "--vocab-size", "1000", "--quick"]
    assert main([*small, "--out", str(tmp_path)]) == 0
    (record,) = map(json.loads, (tmp_path / "ranks.jsonl").read_text().splitlines())
    assert record["settings"]["ranks"] == 2
    assert record["measured"]["loss, heads cut: s"]["median"] > 0
    assert record["measured"]["2 ranks, 2 replicas: cpu_s"]["num"] == 2
    assert record["bytes_moved"] == (1 + 2) * 20 * 64 * 64 * 2
    assert "heads cut over 2" in capsys.readouterr().out


def test_one_rank_has_nobody_to_share_heads_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "1"]) == 2
    assert "--ranks must be >= 2, got 1" in capsys.readouterr().err
