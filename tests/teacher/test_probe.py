"""The start-up probe: it passes what can be served, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from planner.head_spec import HeadSpec
from ring.core.errors import ConfigError
from teacher.body import SplitModel
from teacher.load import prepare
from teacher.probe import apply_head, check_model
from tests.tiny_models import FAMILIES, TOKENIZER_VOCAB, tiny_model, tiny_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": TOKENIZER_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
RECURRENT = {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]}
BARE = {"vocab_size": TOKENIZER_VOCAB, "hidden_size": 32}

# Further families whose logits need something, or whose head or body differs: a bias, a projection, no attention.
OTHERS: dict[str, tuple[Callable[[], Any], float, float | None]] = {
    "HyperCLOVAX": (lambda: transformers.HyperCLOVAXConfig(**COMMON, logits_scaling=3.0), 3.0, None),
    "MiniCPM3": (lambda: transformers.MiniCPM3Config(**COMMON, **LATENT, dim_model_base=8), 0.25, None),
    "FalconH1": (
        lambda: transformers.FalconH1Config(**COMMON, **MAMBA, num_key_value_heads=1, lm_head_multiplier=0.3),
        0.3,
        None,
    ),
    "RecurrentGemma": (
        lambda: transformers.RecurrentGemmaConfig(
            **{k: COMMON[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            **RECURRENT,
            num_attention_heads=2,
            logits_soft_cap=4.0,
        ),
        1.0,
        4.0,
    ),
    "NanoChat": (lambda: transformers.NanoChatConfig(**COMMON, final_logit_softcapping=4.0), 1.0, 4.0),
    "GraniteMoe": (
        lambda: transformers.GraniteMoeConfig(
            **COMMON, logits_scaling=4.0, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
        ),
        0.25,
        None,
    ),
    "Phi": (lambda: transformers.PhiConfig(**COMMON), 1.0, None),
    "OPT": (
        lambda: transformers.OPTConfig(
            **BARE, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16, init_std=0.15
        ),
        1.0,
        None,
    ),
    "Mamba": (lambda: transformers.MambaConfig(**BARE, num_hidden_layers=2, state_size=8), 1.0, None),
}


def build(config: Any, *, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def served(model: Any) -> Any:
    return prepare(model, tiny_tokenizer().get_vocab(), name="tiny")


def own_logits(model: Any, ids_BS: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=ids_BS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_head_of_states_is_the_model_s_logits(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    teacher = served(model)
    ids_BS = torch.tensor([[5, 7, 300, 11, 0, 13], [2, 2, 2, 319, 1, 4]])
    with torch.inference_mode():
        states_BSH = teacher.split.states(ids_BS)
        ours = apply_head(states_BSH, *teacher.head_columns(0, TOKENIZER_VOCAB), teacher.head_spec)
    own = own_logits(model, ids_BS)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    assert own.dtype == dtype
    assert (own.to(ours.dtype) - ours).abs().max() <= tolerance * own.abs().max()


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_pass_with_their_scale_and_cap(name: str) -> None:
    build_config, scale, softcap = OTHERS[name]
    model = build(build_config())
    teacher = served(model)
    assert (teacher.head_spec.logit_scale, teacher.head_spec.logit_softcap) == (pytest.approx(scale), softcap)
    assert teacher.head_spec.hidden_size == model.get_output_embeddings().weight.shape[1]
    assert teacher.head_spec.has_bias == (name == "Phi")


def test_a_head_that_pads_its_vocabulary_says_which_columns_are_real() -> None:
    teacher = served(tiny_model(vocab_size=384))
    assert (teacher.head_spec.vocab_size, teacher.head_spec.real_vocab) == (384, TOKENIZER_VOCAB)


@pytest.mark.parametrize("norm_weight", [1.0, 2.0])
@pytest.mark.case(37)
def test_a_dropped_final_norm_is_caught(norm_weight: float) -> None:
    # Case 37: without the norm the states are still finite and plausible, and training on them fails silently.
    model = tiny_model("llama")
    model.model.norm.weight.data.fill_(norm_weight)
    split = SplitModel(model)
    split.freeze()
    spec = split.spec(TOKENIZER_VOCAB)
    check_model(split, spec)

    def states_before_the_norm(ids_BS: Tensor) -> Tensor:
        norm, model.model.norm = model.model.norm, nn.Identity()
        try:
            return split.states(ids_BS)
        finally:
            model.model.norm = norm

    with pytest.raises(ConfigError, match=r"LlamaForCausalLM: head\(states\) differs"):
        check_model(split, spec, states_of=states_before_the_norm)

    def states_normed_without_the_weight(ids_BS: Tensor) -> Tensor:
        return split.states(ids_BS) / norm_weight

    if norm_weight != 1.0:
        with pytest.raises(ConfigError, match="differs"):
            check_model(split, spec, states_of=states_normed_without_the_weight)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("granite", {"logit_scale": 6.0}),
        ("granite", {"logit_scale": 1.0}),
        ("cohere", {"logit_scale": 4.0}),
        ("gemma3", {"logit_softcap": None}),
        ("qwen3", {"logit_softcap": 50.0}),
        ("qwen3", {"logit_scale": 1.01}),
    ],
)
def test_a_wrong_scale_or_cap_is_caught(family: str, wrong: dict[str, float | None]) -> None:
    split = SplitModel(tiny_model(family))
    split.freeze()
    spec: HeadSpec = dataclasses.replace(split.spec(TOKENIZER_VOCAB), **wrong)
    with pytest.raises(ConfigError, match="differs from the model's own logits by up to") as refusal:
        check_model(split, spec)
    assert split.class_name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_cap_far_above_the_logits_of_the_probe_is_still_seen() -> None:
    # Random weights give logits of 3: a cap of 50 changes them by a thousandth, which bf16 can't see.
    model = tiny_model("gemma3", final_logit_softcapping=50.0, dtype=torch.bfloat16)
    split = SplitModel(model)
    split.freeze()
    spec = split.spec(TOKENIZER_VOCAB)
    assert spec.logit_softcap == 50.0
    check_model(split, spec)
    with pytest.raises(ConfigError, match="differs"):
        check_model(split, dataclasses.replace(spec, logit_softcap=None))


def test_logits_with_a_step_that_no_table_knows_are_refused() -> None:
    model = build(transformers.DoryConfig(**COMMON, num_key_value_heads=2))
    # Its head has a learned scale for each token: more than head, scale and softcap.
    model.lm_head.logit_scale.data.mul_(torch.linspace(0.5, 2.0, TOKENIZER_VOCAB))
    with pytest.raises(ConfigError, match=r"DoryForCausalLM: head\(states\) differs"):
        served(model)


def test_a_model_whose_head_is_a_network_is_refused() -> None:
    model = build(transformers.BertConfig(**COMMON, is_decoder=True))
    with pytest.raises(ConfigError, match="BertLMHeadModel"):
        served(model)


def test_a_model_that_looks_to_the_right_is_refused() -> None:
    model = build(transformers.XLNetConfig(vocab_size=TOKENIZER_VOCAB, d_model=32, n_layer=2, n_head=2, d_inner=64))
    with pytest.raises(ConfigError, match="XLNetLMHeadModel: tokens to the right change the states"):
        served(model)


def test_a_model_without_a_body_under_its_prefix_is_refused() -> None:
    model = tiny_model("llama")
    model.base_model_prefix = "nowhere"
    with pytest.raises(ConfigError, match="LlamaForCausalLM: no body under base_model_prefix 'nowhere'"):
        served(model)


def test_nan_weights_are_refused() -> None:
    model = tiny_model("llama")
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ConfigError, match="differs"):
        served(model)
