"""Four ways to run the same distillation, and the curve is the same; and the pair that the project was made for."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.system.conftest import NUM_STEPS, Inputs, Start
from tests.system.processes import curve
from tests.tiny_models import build_tiny_checkpoint

#: UCX's own ways within one host. A student that knows but one leaves the teacher no other.
UCX_WAYS = {"ucx over tcp": {"UCX_TLS": "tcp"}, "ucx over shared memory": {"UCX_TLS": "posix,sysv,cma"}}


@pytest.mark.parametrize(
    "layout",
    ["zmq", *UCX_WAYS, "colocated", pytest.param("colocated over zmq", marks=pytest.mark.slow)],
)
def test_the_curve_is_the_same_to_the_bit_whatever_carries_the_states(
    inputs: Inputs, endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start, layout: str
) -> None:
    where = {
        "zmq": ("--teacher", endpoint, "--transport", "zmq"),
        # A teacher in this process answers when the trainer waits for it, however short the timeouts are.
        "colocated": (
            *("--teacher", inputs.teacher, "--layout", "colocated"),
            *("--peer-timeout", 0.001, "--request-timeout", 0.001),
        ),
        "colocated over zmq": ("--teacher", inputs.teacher, "--layout", "colocated", "--transport", "zmq"),
        **dict.fromkeys(UCX_WAYS, ("--teacher", endpoint, "--transport", "ucx")),
    }
    student = start_student(*where[layout], env=UCX_WAYS.get(layout))
    student.succeed()
    assert curve(student.out) == quiet_curve
    transport = {"colocated": "local", **dict.fromkeys(UCX_WAYS, "ucx")}.get(layout, "zmq")
    assert list(student.summary["transports"].values()) == [transport]


def test_students_of_one_teacher_do_not_disturb_each_other(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    """Two train side by side over different transports while a third one is killed."""
    one = start_student("--teacher", endpoint, "--transport", "shm", out="one")
    two = start_student("--teacher", endpoint, "--transport", "zmq", out="two")
    doomed = start_student("--teacher", endpoint, "--steps", 100000, out="doomed")
    doomed.until_step(5)
    doomed.send(signal.SIGKILL)
    one.succeed()
    two.succeed()
    assert curve(one.out) == quiet_curve
    assert curve(two.out) == quiet_curve


def test_the_fused_loss_follows_the_full_one(
    inputs: Inputs, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    student = start_student("--teacher", inputs.teacher, "--layout", "colocated", "--loss", "full")
    student.succeed()
    full = curve(student.out)
    assert len(full) == NUM_STEPS
    for name in ("lm_loss", "kd", "loss"):
        assert [step[name] for step in full] == pytest.approx([step[name] for step in quiet_curve], rel=1e-4)
    assert full != quiet_curve, "two ways to compute it: equal to the bit would mean that one ran twice"


def test_fused_and_full_loss_agree_in_float64(inputs: Inputs, start_student: Start) -> None:
    lines = []
    for loss in ("fused", "full"):
        student = start_student(
            *("--teacher", inputs.teacher, "--layout", "colocated", "--loss", loss, "--steps", 1, "--warmup-steps", 0),
            *("--precision", "fp64", "--teacher-dtype", "fp64"),
            out=loss,
        )
        student.succeed()
        lines += curve(student.out)
    fused, full = lines
    for name in ("lm_loss", "kd", "loss", "grad_norm"):
        assert fused[name] == pytest.approx(full[name], rel=1e-9), name


def test_a_moe_teacher_with_linear_attention_teaches_a_dense_student_over_zmq(
    tmp_path: Path, inputs: Inputs, start_teacher: Start, start_student: Start
) -> None:
    """The pair that users bring, in small: Qwen3.5-MoE -> dense Qwen3.5, as two processes, in bf16."""
    moe = build_tiny_checkpoint(tmp_path / "moe", "qwen3_5_moe", seed=5, hidden_size=48, dtype=torch.bfloat16)
    dense = build_tiny_checkpoint(tmp_path / "dense", "qwen3_5", seed=6)
    teacher = start_teacher(model=moe)
    student = start_student(
        *("--student", dense, "--teacher", teacher.endpoint, "--transport", "zmq"),
        *("--steps", 20, "--precision", "bf16", "--lr", "3e-3", "--eval-data", inputs.eval_data),
    )
    student.succeed()
    steps = curve(student.out)
    assert len(steps) == 20
    assert steps[-1]["loss"] < steps[0]["loss"]
    summary = student.summary
    assert summary["ending"] == "finished"
    assert list(summary["transports"].values()) == ["zmq"]
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    trained = transformers.AutoModelForCausalLM.from_pretrained(student.out / "model")
    assert type(trained).__name__ == "Qwen3_5ForCausalLM"
    config = json.loads((moe / "config.json").read_text())
    assert "linear_attention" in config["layer_types"]
    assert config["num_experts"] == 4
