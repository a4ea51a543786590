"""What a layer saves for its backward pass: the closed form against every storage that autograd really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from planner.activations import Arithmetic, saved_bytes
from planner.families import shape_of

#: So that no width equals another, nor the number of tokens: weights' casts are told apart by their shapes.
SEQUENCE, BATCH = 200, 2
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 144,
    "intermediate_size": 328,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 72,
    "shared_expert_intermediate_size": 72,
}
HYBRID: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 24,
}
#: Counted to the last operation.
EXACT: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 24},
    "llama": {},
    "granite": {},
    "qwen2": {},
    "mistral": {},
    "olmo2": {},
    "phi3": {},
    "gemma3_text": {"head_dim": 24},
    "gemma2": {"head_dim": 24},
}
#: Many small operations, or experts: about right.
CLOSE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 24},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
ARITHMETICS: tuple[Arithmetic, ...] = ("bf16", "autocast", "fp32")


def held_by_layers(raw: dict[str, Any], arithmetic: Arithmetic) -> float:
    """Bytes per token that two further layers make the body hold: without rotary tables, masks and the last norm."""
    return held_bytes(raw, arithmetic, num_layers=4) - held_bytes(raw, arithmetic, num_layers=2)


def held_bytes(raw: dict[str, Any], arithmetic: Arithmetic, *, num_layers: int) -> float:
    """Bytes per token of every storage that the body's graph holds; parameters and their casts aside."""
    settings = {key: value for key, value in raw.items() if key != "model_type"} | {"num_hidden_layers": num_layers}
    config = transformers.AutoConfig.for_model(raw["model_type"], **settings)
    dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = [sorted(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1]
    held: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast = arithmetic == "autocast" and tensor.dtype == torch.bfloat16 and sorted(tensor.shape) in shapes
        if storage.data_ptr() not in own:
            held.setdefault(storage.data_ptr(), (storage, is_cast))
        return tensor

    ids_BS = torch.randint(1, raw["vocab_size"], (BATCH, SEQUENCE))
    body = getattr(model, model.base_model_prefix)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "autocast"),
    ):
        body(input_ids=ids_BS, use_cache=False)
    return sum(storage.nbytes() for storage, is_cast in held.values() if not is_cast) / (BATCH * SEQUENCE)


def predicted_by_layers(raw: dict[str, Any], arithmetic: Arithmetic) -> int:
    four, two = (
        saved_bytes(
            shape_of(raw | {"num_hidden_layers": num_layers}, name=raw["model_type"]),
            arithmetic,
            sequence_tokens=SEQUENCE,
            delta_kernel="torch",
        )
        for num_layers in (4, 2)
    )
    return four - two


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("family", EXACT)
def test_saved_bytes_of_dense_families_are_counted(family: str, arithmetic: Arithmetic) -> None:
    raw = SIZES | EXACT[family] | {"model_type": family}
    assert predicted_by_layers(raw, arithmetic) == pytest.approx(held_by_layers(raw, arithmetic), rel=0.005)


# Under autocast every expert's weight is cast by itself, which the shapes do not tell from activations.
@pytest.mark.parametrize("arithmetic", ["bf16", "fp32"])
@pytest.mark.parametrize("family", CLOSE)
def test_saved_bytes_of_experts_and_delta_nets_are_close(family: str, arithmetic: Arithmetic) -> None:
    raw = SIZES | CLOSE[family] | {"model_type": family}
    assert predicted_by_layers(raw, arithmetic) == pytest.approx(held_by_layers(raw, arithmetic), rel=0.03)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_sliding_windows_cost_more_only_where_they_are_shorter_than_the_sequence(arithmetic: Arithmetic) -> None:
    raw = SIZES | {"model_type": "mistral", "sliding_window": 64}
    short = predicted_by_layers(raw, arithmetic)
    assert short == pytest.approx(held_by_layers(raw, arithmetic), rel=0.005)
    assert short > predicted_by_layers(raw | {"sliding_window": 4096}, arithmetic)
