"""What stands between states and logits, read from configs of real classes; and the hash of the token map."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.head_spec import HeadSpec, head_spec_of, max_positions_of
from planner.token_map import num_tokens_of, token_map_hash
from tests.tiny_models import TOKENIZER_VOCAB, build_tiny_checkpoint, tiny_tokenizer


def spec_of(config: object, class_name: str, **sizes: Any) -> HeadSpec:
    given_sizes = {"hidden_size": 32, "vocab_size": 320, "has_bias": False, "dtype": "fp32"} | sizes
    return head_spec_of(config, class_name, **given_sizes)


@pytest.mark.parametrize(
    ("class_name", "attributes", "scale", "softcap"),
    [
        ("LlamaForCausalLM", {}, 1.0, None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 30.0}, 1.0, 30.0),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": None}, 1.0, None),
        ("Gemma3ForConditionalGeneration", {"final_logit_softcapping": 30.0}, 1.0, None),
        ("RecurrentGemmaForCausalLM", {"logits_soft_cap": 30}, 1.0, 30.0),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}, 0.125, None),
        ("GraniteMoeHybridForCausalLM", {"logits_scaling": 8}, 0.125, None),
        ("HyperCLOVAXForCausalLM", {"logits_scaling": 8.0}, 8.0, None),
        ("MiniCPM3ForCausalLM", {"logits_scaling": 8.0}, 0.125, None),
        ("CohereForCausalLM", {"logit_scale": 0.0625}, 0.0625, None),
        ("Cohere2ForCausalLM", {"logit_scale": 0.25}, 0.25, None),
        ("FalconH1ForCausalLM", {"lm_head_multiplier": 0.02}, 0.02, None),
        ("FalconForCausalLM", {"lm_head_multiplier": 0.02}, 1.0, None),
        # MPT has the attribute but never applies it.
        ("MptForCausalLM", {"logit_scale": 0.5}, 1.0, None),
    ],
)
def test_scale_always_multiplies_whatever_the_family_calls_it(
    class_name: str, attributes: dict[str, float], scale: float, softcap: float | None
) -> None:
    spec = spec_of(SimpleNamespace(**attributes), class_name)
    assert (spec.logit_scale, spec.logit_softcap) == (scale, softcap)


def test_the_text_part_of_a_wrapped_config_is_read() -> None:
    text = SimpleNamespace(final_logit_softcapping=30.0, max_position_embeddings=77)
    wrapped = SimpleNamespace(get_text_config=lambda: text, final_logit_softcapping=None)
    assert spec_of(wrapped, "Gemma4ForConditionalGeneration").logit_softcap == 30.0
    assert max_positions_of(wrapped) == 77


@pytest.mark.parametrize(
    ("num_tokens", "unpadded", "real_vocab"),
    [(None, None, 320), (300, None, 300), (300, 299, 299), (None, 310, 310), (321, None, 320)],
)
def test_columns_past_the_defined_tokens_are_padding(
    num_tokens: int | None, unpadded: int | None, real_vocab: int
) -> None:
    config = SimpleNamespace(unpadded_vocab_size=unpadded)
    assert spec_of(config, "LlamaForCausalLM", num_tokens=num_tokens).real_vocab == real_vocab


@pytest.mark.parametrize(
    ("class_name", "attributes"),
    [
        ("GraniteForCausalLM", {"logits_scaling": 0.0}),
        ("CohereForCausalLM", {"logit_scale": float("nan")}),
        ("CohereForCausalLM", {"logit_scale": "inv_sqrt_d_model"}),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": -1.0}),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": True}),
    ],
)
def test_an_unusable_scale_or_cap_is_refused(class_name: str, attributes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        spec_of(SimpleNamespace(**attributes), class_name)


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 0}, {"vocab_size": 0}, {"dtype": "int8"}, {"num_tokens": 0}, {"dtype": "torch.float32"}]
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        spec_of(SimpleNamespace(), "LlamaForCausalLM", **sizes)


TOKEN_MAPS = st.dictionaries(st.text(max_size=6), st.integers(0, 2**32), min_size=1, max_size=12)


@given(TOKEN_MAPS, st.randoms())
def test_token_map_hash_does_not_depend_on_order(token_ids: dict[str, int], random: Any) -> None:
    shuffled = list(token_ids.items())
    random.shuffle(shuffled)
    assert token_map_hash(dict(shuffled)) == token_map_hash(token_ids)


@given(TOKEN_MAPS, TOKEN_MAPS)
def test_different_token_maps_have_different_hashes(one: dict[str, int], other: dict[str, int]) -> None:
    assert (token_map_hash(one) == token_map_hash(other)) == (one == other)


def test_tokens_that_look_like_the_hash_s_own_separators_stay_apart() -> None:
    maps = [{"a1:1:b": 0}, {"a": 0, "b": 1}, {"a0:1:b": 0}, {"a": 1, "b": 0}, {"ab": 0}, {"\ud800": 0}]
    hashes = [token_map_hash(token_ids) for token_ids in maps]
    assert all(one != other for one, other in itertools.combinations(hashes, 2))


def test_token_map_hash_survives_saving_the_tokenizer(tmp_path: Any) -> None:
    import transformers

    build_tiny_checkpoint(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert token_map_hash(loaded.get_vocab()) == token_map_hash(tiny_tokenizer().get_vocab())
    assert num_tokens_of(loaded.get_vocab()) == TOKENIZER_VOCAB


@pytest.mark.parametrize("token_ids", [{}, {"a": -1}, {"a": 1.0}, {"a": True}])
def test_a_token_map_that_is_none_is_refused(token_ids: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="token map"):
        token_map_hash(token_ids)
