"""The loss's bench runs, measures what it says, and fails where a figure is beyond its limit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench.bench_kd_loss as bench_kd_loss
from bench.bench_kd_loss import QUICK_CASE, TARGET_CASE, TARGETS, Figures, main
from bench.loss_memory import MeasurementFailed, extra_bytes
from bench.loss_ways import FLOOR, FULL, LIGER, WAYS, Inputs, LossCase, Way, predicted
from bench.report import exit_code


def figures(over_floor: float, full_memory: float) -> dict[str, Figures]:
    """Of every way: the same, in a machine that got twice as slow after the first round."""

    def of(ratio: float, num_bytes: float) -> Figures:
        return Figures(cpu_s=(ratio, 2 * ratio, 2 * ratio), extra_bytes=num_bytes, conversion_bytes=0.0)

    found = {FLOOR: of(1.0, 0.0)} | {name: of(over_floor, 1e6) for name in TARGETS}
    return found | {FULL: of(4.0, full_memory * 1e6)}


def test_the_quick_bench_measures_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_threads = torch.get_num_threads()
    plot = tmp_path / "loss.png"
    arguments = ["--quick", "--rounds", "2", "--peers", "false", "--out", str(tmp_path), "--plot", str(plot)]
    assert main(arguments) == 0
    assert torch.get_num_threads() == num_threads
    record = json.loads((tmp_path / "loss.jsonl").read_text())
    names = {name.partition(":")[0] for name in record["measured"]}
    assert names == {FLOOR, FULL, "keep, fast, JSD", "recompute, fast, JSD"}
    assert all(record["measured"][f"{name}: cpu_s"]["num"] == 2 for name in names)
    # Sizes so small prove nothing about speed: figures are reported, not judged.
    assert {check["verdict"] for check in record["checks"]} == {"reported"}
    assert any(note.startswith(LIGER) and "--peers false" in note for note in record["notes"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert LIGER in capsys.readouterr().out


def test_other_libraries_are_not_imported_unless_asked() -> None:
    code = "import sys, bench.bench_kd_loss; print(sorted({'liger_kernel', 'trl', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_library_that_is_absent_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ways, absent = bench_kd_loss._ways(bench_kd_loss.LossBenchConfig())
    assert LIGER not in [way.name for way in ways]
    assert f"{LIGER}: not installed; pip install --no-deps liger-kernel" in absent


@pytest.mark.parametrize(
    ("over_floor", "full_memory", "verdicts", "code"),
    [
        (1.10, 250, {"met"}, 0),
        (1.35, 250, {"met", "missed"}, 0),
        (1.39, 250, {"met", "missed", "failed"}, 1),
        (1.10, 70, {"met", "failed"}, 1),
    ],
)
def test_figures_fail_beyond_the_limits_of_the_targets(
    over_floor: float, full_memory: float, verdicts: set[str], code: int
) -> None:
    checks = list(bench_kd_loss._checks(TARGET_CASE, figures(over_floor, full_memory)))
    assert {check.verdict for check in checks} == verdicts
    assert exit_code(checks) == code


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.mode is not None])
def test_ours_cost_what_the_closed_forms_say(name: str) -> None:
    case = LossCase(rows=256, vocab_size=8000, student_hidden=16, teacher_hidden=32, dtype="bf16")
    foretold = predicted(WAYS[name], case)
    assert foretold["workspace_bytes"] > 2 * 128 * 4000
    assert 1.0 <= foretold["flops_over_floor"] <= 2.4
    inputs = Inputs(case)
    WAYS[name].start(inputs)()
    assert inputs.student_NH.grad is not None
    assert inputs.student_VH.grad is not None


def test_every_way_without_other_libraries_gives_the_gradient_of_the_same_loss() -> None:
    grads = {}
    for name in ("keep, fast, JSD", "recompute, fast, JSD", FULL):
        inputs = Inputs(QUICK_CASE)
        WAYS[name].start(inputs)()
        assert inputs.student_VH.grad is not None
        grads[name] = inputs.student_VH.grad.float()
    for grad in grads.values():
        torch.testing.assert_close(grad, grads[FULL], rtol=0.1, atol=0.02 * float(grads[FULL].abs().max()))


def test_memory_of_the_full_loss_is_at_least_its_logits() -> None:
    case = LossCase(rows=512, vocab_size=20_000, student_hidden=8, teacher_hidden=8, dtype="fp32")
    assert extra_bytes(WAYS[FULL], case, handed_over=True) >= 4 * 512 * 20_000 * 4


def test_a_process_that_fails_to_measure_says_why() -> None:
    way = Way(name=FULL, start=WAYS[FULL].start)
    case = LossCase(rows=4, vocab_size=8, student_hidden=4, teacher_hidden=4, dtype="int3")
    with pytest.raises(MeasurementFailed, match=r"full logits.*ended with 1: KeyError: 'int3'"):
        extra_bytes(way, case, handed_over=True)


def test_quick_and_all_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--all"]) == 2
    assert "--quick and --all: got both" in capsys.readouterr().err
