"""Parameters from a config, against the real classes on the meta device and against published counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from planner.architecture import ModelShape
from planner.errors import PlanError
from planner.families import FAMILIES, shape_of
from planner.models import PRESETS, find_model

# Counted in published checkpoints (text tower, without next-token heads), or stated by their makers.
PUBLISHED = {
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-2B": 1_881_825_088,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.5-397B-A17B": 396_346_350_336,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-8B": 8_030_261_248,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
ROUNDED_BILLIONS = {"DeepSeek-V3": 671.03, "Kimi-K2": 1026.4, "Llama-3.1-405B": 405.9, "Llama-3.1-70B": 70.55}
#: Presets of every family; the two layers that are kept of each hold all of its kinds of layer where two can.
ON_META = (
    "Qwen3.5-9B",
    "Qwen3.5-0.8B",
    "Qwen3.5-35B-A3B",
    "Qwen3-8B",
    "Qwen3-0.6B",
    "Qwen3-30B-A3B",
    "Llama-3.1-8B",
    "Llama-3.2-1B",
    "Mistral-7B-v0.3",
    "Gemma-3-4B",
    "gpt-oss-20b",
    "DeepSeek-V3",
    "Kimi-K2",
    "GLM-4.5",
    "GLM-4.5-Air",
    "Phi-3-mini",
)
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
#: What the presets leave untried: families without one, biases, other patterns of layers.
VARIANTS: dict[str, dict[str, Any]] = {
    "granite": {"model_type": "granite", "tie_word_embeddings": True},
    "granite with biases": {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "llama with biases and its own head size": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "qwen2": {"model_type": "qwen2"},
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {"model_type": "gemma2"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "gemma3 with listed layers": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3 moe, every second layer sparse": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
    },
    "qwen3 moe with dense layers": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0, 2],
    },
    "deepseek without query rank": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "qwen3.5, every second layer full": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "phi3 with shared keys": {"model_type": "phi3", "pad_token_id": 0},
}


def meta_model(raw: dict[str, Any]) -> Any:
    """The real class without weights."""
    settings = {key: value for key, value in raw.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(raw["model_type"], **settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def assert_same_parameters(shape: ModelShape, raw: dict[str, Any]) -> None:
    parameters = list(meta_model(raw).parameters())
    assert shape.num_params == sum(p.numel() for p in parameters)
    assert shape.params.tensors == len(parameters)
    assert shape.params.largest == max(p.numel() for p in parameters)
    assert sum(shape.components().values()) == shape.num_params


@pytest.mark.parametrize("name", ON_META)
def test_parameters_of_a_preset_are_those_of_the_real_class(name: str) -> None:
    # As many layers as show every kind: the counts of all of them are compared with the published ones.
    raw = dict(PRESETS[name]) | {"num_hidden_layers": 8}
    assert_same_parameters(shape_of(raw, name=name), raw)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_a_variant_are_those_of_the_real_class(variant: str) -> None:
    raw = TINY | VARIANTS[variant]
    assert_same_parameters(shape_of(raw, name=variant), raw)


def test_every_family_is_compared_with_its_real_class() -> None:
    compared = {PRESETS[name]["model_type"] for name in ON_META} | {raw["model_type"] for raw in VARIANTS.values()}
    # The wrapper's type stands for its text part; Kimi-K2 is DeepSeek-V3's class under another name.
    others = {"qwen3_5", "qwen3_5_moe", "kimi_k2"}
    assert set(FAMILIES) - compared == others
    page = (Path(__file__).parents[2] / "docs" / "cost-models.md").read_text()
    assert f"the real classes of {len(compared)} model types ({len(others)} more are other names of theirs)" in page


def test_what_the_page_says_is_missing_follows_from_its_own_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost-models.md").read_text()
    said = re.search(r"What is missing, (\d+) to (\d+) MiB in all of them", page)
    table = page[page.index("| Shape | colocated, full |") :].partition("\n\n")[0]
    missing = [int(measured) - int(predicted) for predicted, measured in re.findall(r"(\d+) / (\d+)", table)]
    assert said is not None
    assert len(missing) == 18
    assert [int(number) for number in said.groups()] == [min(missing), max(missing)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_are_met(name: str) -> None:
    assert find_model(name, flag="--teacher").num_params == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED_BILLIONS)
def test_published_round_numbers_are_met(name: str) -> None:
    assert find_model(name, flag="--teacher").num_params / 1e9 == pytest.approx(ROUNDED_BILLIONS[name], rel=2e-4)


def test_active_parameters_are_what_the_names_say() -> None:
    active = {name: find_model(name, flag="--teacher").active_params / 1e9 for name in PRESETS}
    # Embeddings count in some makers' figures and not in others: within half a billion of the name, or a tenth.
    for name, said in {"Qwen3.5-35B-A3B": 3, "Qwen3.5-122B-A10B": 10, "Qwen3.5-397B-A17B": 17, "Kimi-K2": 32}.items():
        assert abs(active[name] - said) <= max(0.5, said / 10), name


def test_a_saved_config_counts_like_its_model(tmp_path: Path) -> None:
    raw = TINY | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8}
    settings = {key: value for key, value in raw.items() if key != "model_type"}
    transformers.Qwen3Config(**settings).save_pretrained(tmp_path / "saved")
    shape = find_model(str(tmp_path / "saved"), flag="--student")
    assert shape.num_params == sum(p.numel() for p in meta_model(raw).parameters())
    assert shape.name == "saved"


def test_a_nested_text_config_is_found_and_keeps_its_tie(tmp_path: Path) -> None:
    text = {key: value for key, value in PRESETS["Qwen3.5-0.8B"].items() if key not in ("tie_word_embeddings",)}
    raw = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True, "vision_config": {"depth": 27}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert find_model(str(tmp_path), flag="--student").num_params == PUBLISHED["Qwen3.5-0.8B"]


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(dict(PRESETS["Qwen3-0.6B"])))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model("some/model", flag="--teacher").num_params == 596_049_920


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "model_type None"),
        ({"model_type": "mamba"}, "model_type 'mamba' has no closed form here; known: "),
        ({"model_type": "llama"}, "its config has no hidden_size"),
        (TINY | {"model_type": "llama", "hidden_size": -4}, "config.hidden_size is -4; allowed: a whole number"),
        (TINY | {"model_type": "llama", "hidden_size": "32"}, "config.hidden_size is '32'"),
        (TINY | {"model_type": "llama", "hidden_size": 34}, "not a multiple of 4 attention heads"),
        (TINY | {"model_type": "llama", "num_key_value_heads": 3}, "4 attention heads don't share 3"),
        (TINY | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"]}, "1 layer types for 3 layers"),
        ({"text_config": 3}, "config.text_config is 3; allowed: an object"),
        (TINY | {"model_type": "llama", "num_hidden_layers": 10**8}, "config.num_hidden_layers is 100000000; allowed"),
        (
            TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "config.num_experts_per_tok is 5; allowed: at most the 4 experts",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_what_was_found(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)) as caught:
        shape_of(raw, name="model")
    assert "\n" not in str(caught.value)


def test_an_unknown_model_is_refused_with_what_is_known() -> None:
    with pytest.raises(PlanError, match=r"--teacher Qwen/Qwen3\.5-9: no preset.*Qwen3\.5-9B") as caught:
        find_model("Qwen/Qwen3.5-9", flag="--teacher")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=r"--student: .*config\.json"):
        find_model(str(tmp_path), flag="--student")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"a directory without a config\.json"):
        find_model(str(tmp_path), flag="--student")


def test_scaled_models_keep_the_mix_of_their_layers() -> None:
    shape = find_model("Qwen3.5-9B", flag="--student")
    assert shape.with_layers(32) == shape
    half = shape.with_layers(16)
    assert [layer.count for layer in half.layers] == [12, 4]
    assert half.body.count - half.final_norm.count == (shape.body.count - shape.final_norm.count) // 2
    assert shape.with_layers(1).num_layers == 1
