"""The head comes through the ring itself: whole, to the bit, with its bias, and only if its hash is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from ring.core.errors import RemoteProtocolError
from ring.head import fetch_head
from teacher.forward import TeacherModel
from teacher.load import prepare
from tests.ring.rig import BACKENDS, Teacher, consume, open_ring
from tests.tiny_models import TOKENIZER_VOCAB, tiny_tokenizer


@pytest.fixture(scope="module")
def biased_model() -> TeacherModel:
    """Phi's head has a bias."""
    config = transformers.PhiConfig(
        vocab_size=TOKENIZER_VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        phi = transformers.PhiForCausalLM(config).eval()
        torch.nn.init.normal_(phi.lm_head.bias)
    return prepare(phi, tiny_tokenizer().get_vocab(), name="biased")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_head_larger_than_a_slot_arrives_whole(model: TeacherModel, backend: str, depth: int) -> None:
    weight_VH = model.split.weight_VH
    with (
        Teacher(model, backend=backend) as asked,
        open_ring(model, asked, max_rows=8, transport=backend, depth=depth) as ring,
    ):
        assert weight_VH.nbytes > 3 * ring.slot_bytes
        weight, bias = fetch_head(ring)
        assert torch.equal(weight, weight_VH)
        assert bias is None
        weight.add_(1.0)  # the caller owns it
        consume(ring, model, range(6))


def test_a_bias_comes_behind_the_weight(biased_model: TeacherModel) -> None:
    with Teacher(biased_model) as asked, open_ring(biased_model, asked, max_rows=40) as ring:
        assert biased_model.head_info().num_bytes % ring.slot_bytes, "the last piece is a smaller one"
        weight, bias = fetch_head(ring)
    assert torch.equal(weight, biased_model.split.weight_VH)
    assert bias is not None
    assert torch.equal(bias, biased_model.split.bias_V)


def test_a_head_that_hashes_to_something_else_is_refused(model: TeacherModel) -> None:
    other = dataclasses.replace(model, head_sha256="0" * 64)
    with Teacher(other) as asked, open_ring(other, asked) as ring, pytest.raises(RemoteProtocolError) as refused:
        fetch_head(ring)
    assert str(refused.value) == f"the teacher's head hashes to {model.head_sha256}; it announced {'0' * 64}"


def test_a_head_comes_from_several_replicas_and_past_a_stopped_one(model: TeacherModel) -> None:
    with (
        Teacher(model) as stopped,
        Teacher(model) as other,
        open_ring(model, stopped, other, request_timeout_s=0.3, ping_interval_s=0.1) as ring,
    ):
        consume(ring, model, range(-2000, -1990))
        stopped.freeze()
        weight, _ = fetch_head(ring)
        assert torch.equal(weight, model.split.weight_VH)
        consume(ring, model, range(4))


@pytest.mark.parametrize("columns", [(0, 107), (214, TOKENIZER_VOCAB), (5, 6), (7, 7)])
def test_some_columns_arrive_with_their_bias_and_their_own_hash(
    biased_model: TeacherModel, columns: tuple[int, int]
) -> None:
    with Teacher(biased_model) as asked, open_ring(biased_model, asked, max_rows=40) as ring:
        weight, bias = fetch_head(ring, columns=columns)
        consume(ring, biased_model, range(3))
    assert bias is not None
    assert torch.equal(weight, biased_model.split.weight_VH[slice(*columns)])
    assert torch.equal(bias, biased_model.split.bias_V[slice(*columns)])


def test_columns_that_hash_to_something_else_are_refused(model: TeacherModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TeacherModel, "head_columns_sha256", lambda self, start, stop: "ab" * 32)
    with Teacher(model) as asked, open_ring(model, asked) as ring, pytest.raises(RemoteProtocolError) as refused:
        fetch_head(ring, columns=(3, 90))
    assert f"it announced {'ab' * 32}" in str(refused.value)
