"""FSDP as it is by default: weights gathered as bf16, kept and written as float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.ranks.conftest import NUM_STEPS, StartWorld
from tests.ranks.test_runs import EXACT
from tests.system.conftest import Inputs, Start
from tests.system.processes import curve

#: bf16 has 8 bits. Alone, autocast rounds the weights that it multiplies; gathered as bf16 norms are rounded too.
TOLERANCE = 2e-2
EVERY = 4


def evaluations(out: Path) -> list[float]:
    return [json.loads(line)["eval_loss"] for line in (out / "eval.jsonl").read_text().splitlines()]


def test_a_world_in_bf16_has_the_curve_of_one_process_and_writes_float32(
    inputs: Inputs, endpoint: str, start_world: StartWorld, start_student: Start
) -> None:
    """Evaluations leave whole weights behind, in bf16, while a checkpoint is written in the background."""
    flags = ("--teacher", endpoint, "--precision", "bf16", "--eval-data", inputs.eval_data, "--checkpoint-every", EVERY)
    alone = start_student(*flags, "--steps", NUM_STEPS, "--batch-size", 8, "--grad-accum", 1, out="alone")
    world = start_world(*flags, "--fsdp", "--keep-checkpoints", NUM_STEPS, size=2)
    alone.succeed()
    world.succeed()
    for ours, theirs in zip(curve(world.out), curve(alone.out), strict=True):
        assert [ours[name] for name in EXACT] == [theirs[name] for name in EXACT]
        for name in ("lm_loss", "kd", "loss", "grad_norm"):
            assert math.isclose(ours[name], theirs[name], rel_tol=TOLERANCE), (ours["step"], name)
    held_out = zip(evaluations(world.out), evaluations(alone.out), strict=True)
    assert all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in held_out)
    written = sorted((world.out / "checkpoints").iterdir())
    assert len(written) == NUM_STEPS // EVERY
    configs = [checkpoint / "model" / "config.json" for checkpoint in written] + [world.out / "model" / "config.json"]
    assert [json.loads(path.read_text())["dtype"] for path in configs] == ["float32"] * len(configs)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(world.out / "model", dtype="auto")
    weights = load_file(world.out / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    weight = model.get_input_embeddings().weight
    assert (weight != weight.bfloat16().float()).any(), "not rounded on the way"
