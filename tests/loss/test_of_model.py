"""Heads of real model classes: what the loss makes of their states are the model's own logits, or there is a
refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from student.loss import Head, KDLoss, head_of

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def models() -> dict[str, Any]:
    gpt2 = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    return {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        "qwen3-tied": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "gemma2-capped": Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.05)),
        "cohere-scaled": CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
        "granite-divided": GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
        "phi-biased": PhiForCausalLM(PhiConfig(**{key: value for key, value in SIZES.items() if key != "head_dim"})),
        "gpt2": GPT2LMHeadModel(gpt2),
    }


@pytest.fixture(scope="module")
def zoo() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: model.double().eval() for name, model in models().items()}


NAMES = ["qwen3", "qwen3-tied", "gemma2-capped", "cohere-scaled", "granite-divided", "phi-biased", "gpt2"]


@pytest.mark.parametrize("name", NAMES)
def test_loss_on_final_states_is_the_models_own_cross_entropy(name: str, zoo: dict[str, Any]) -> None:
    model = zoo[name]
    ids = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(1))
    body = getattr(model, model.base_model_prefix)
    states = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    if model.get_output_embeddings().bias is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    out = KDLoss(kd_weight=0.0, ce_weight=1.0)(states, head_of(model), None, None, ids[:, 1:].flatten(), all_rows=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    wanted = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=0)
    found_grad = torch.autograd.grad(out.loss, model.get_output_embeddings().weight, retain_graph=True)[0]
    wanted_grad = torch.autograd.grad(wanted, model.get_output_embeddings().weight)[0]
    torch.testing.assert_close(found_grad, wanted_grad, rtol=1e-8, atol=1e-12)


def test_columns_past_the_tokenizers_ids_are_padding(zoo: dict[str, Any]) -> None:
    assert head_of(zoo["qwen3"]).num_real_columns == 40
    assert head_of(zoo["qwen3"], num_tokens=33).num_real_columns == 33


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("logit_scale", 0.3), ("final_logits_temperature", 2.0), ("lm_head_multiplier", 0.5), ("logits_soft_cap", 20.0)],
)
def test_what_touches_logits_and_is_not_known_is_refused_by_name(attribute: str, value: float) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    setattr(model.config, attribute, value)
    with pytest.raises(ValueError, match=rf"Qwen3ForCausalLM: config\.{attribute}"):
        head_of(model)
    setattr(model.config, attribute, None)
    assert isinstance(head_of(model), Head)


class LowRankAdapter(nn.Linear):
    """A head with an adapter beside its weight, as adapter libraries put it there."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__(base_layer.in_features, base_layer.out_features, bias=False)
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))


def test_an_adapter_on_the_head_is_refused_with_the_way_out() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    model.set_output_embeddings(LowRankAdapter(model.get_output_embeddings()))
    with pytest.raises(ValueError, match=r"LowRankAdapter.*merge"):
        head_of(model)


def test_a_model_without_an_output_head_is_refused(zoo: dict[str, Any]) -> None:
    body = zoo["qwen3"].model
    with pytest.raises(ValueError, match=r"Qwen3Model.*NoneType"):
        head_of(body)


def test_a_head_that_an_offload_has_put_aside_is_refused_with_the_way_out() -> None:
    # accelerate's offload leaves such weights in the model, and fetches the true ones within forward alone.
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to("meta")
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM: .*weight is on meta.*allowed.*device_map"):
        head_of(model)
