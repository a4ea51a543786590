"""Heads from a teacher that lies: a wrong one is refused or asked for again, and never trained with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring.core.errors import ConfigError, RemoteProtocolError
from ring.core.messages import HeadInfo, HeadRequest
from ring.head import fetch_head
from teacher.forward import TeacherModel
from teacher.load import prepare
from tests.ring.rig import Teacher, consume, open_ring
from tests.security.test_decoders import MANY, fuzz
from tests.tiny_models import tiny_model, tiny_tokenizer

Piece = list[torch.Tensor]


@pytest.fixture(scope="module")
def model() -> TeacherModel:
    return prepare(tiny_model("qwen3", seed=3), tiny_tokenizer().get_vocab(), name="tiny")


def whole(piece: Piece) -> torch.Tensor:
    return torch.cat([part.view(-1).view(torch.uint8) for part in piece])


def flipped(piece: Piece) -> Piece:
    bent = whole(piece).clone()
    bent[len(bent) // 2] ^= 1
    return [bent]


def nan(piece: Piece) -> Piece:
    return [torch.full((len(whole(piece)),), 0xFF, dtype=torch.uint8)]


#: What a teacher sends instead of the piece that it was asked for, the one before it at hand.
LIES: dict[str, Callable[[Piece, Piece], Piece]] = {
    "the truth": lambda piece, _: piece,
    "the piece before": lambda _, before: before,
    "one byte less": lambda piece, _: [whole(piece)[:-1].clone()],
    "one byte more": lambda piece, _: [torch.cat([whole(piece), torch.zeros(1, dtype=torch.uint8)])],
    "nothing": lambda _, __: [],
    "twice": lambda piece, _: [*piece, *piece],
    "another bit": lambda piece, _: flipped(piece),
    "NaN": lambda piece, _: nan(piece),
    "shifted": lambda piece, _: [whole(piece).roll(1)],
}


@given(lies=st.lists(st.sampled_from(sorted(LIES)), max_size=4), in_part=st.booleans())
@settings(fuzz, max_examples=max(15, MANY // 8))  # a piece of another size is waited for until its time is over
def test_a_head_is_right_or_refused_whatever_its_pieces_are(
    model: TeacherModel, lies: list[str], in_part: bool
) -> None:
    left, tell = list(lies), TeacherModel.head_piece
    before: Piece = []

    def lie(teacher: TeacherModel, request: HeadRequest) -> Piece:
        nonlocal before
        piece = tell(teacher, request)
        told = LIES[left.pop(0)](piece, before) if left else piece
        before = piece
        # What is larger than a slot its own transport refuses to send.
        return told if sum(part.nbytes for part in told) <= ring.slot_bytes else piece

    columns = (3, 200) if in_part else None
    with pytest.MonkeyPatch.context() as patch, Teacher(model) as asked:
        patch.setattr(TeacherModel, "head_piece", lie)
        with open_ring(model, asked, max_rows=24, request_timeout_s=0.3, ping_interval_s=0.1) as ring:
            try:
                weight, _ = fetch_head(ring, columns=columns)
            except RemoteProtocolError as error:
                assert "the teacher's head hashes to" in str(error)  # noqa: PT017 - or it is right
            else:
                assert torch.equal(weight, model.split.weight_VH[slice(*(columns or (None, None)))])


def announcing(patch: pytest.MonkeyPatch, **changes: object) -> None:
    tell = TeacherModel.head_info

    def lie(teacher: TeacherModel) -> HeadInfo:
        return dataclasses.replace(tell(teacher), **changes)

    patch.setattr(TeacherModel, "head_info", lie)


def test_a_head_that_no_memory_could_hold_is_refused_before_it_is_asked_for(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    announcing(monkeypatch, vocab_size=2**31 - 1, num_bytes=2**40)
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        with pytest.raises(ConfigError, match=r"2147483647 columns of the teacher's head need .* bytes of memory, but"):
            fetch_head(ring)
        consume(ring, model, range(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_is_refused_though_its_hash_is_right(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    broken = prepare(tiny_model("qwen3", seed=3), tiny_tokenizer().get_vocab(), name="broken")
    real = broken.head_info().real_vocab
    with torch.no_grad():
        broken.split.weight_VH[real - 1, 5] = value
    digest = broken.head_columns_sha256(0, broken.split.weight_VH.shape[0])
    announcing(monkeypatch, sha256=digest)
    with Teacher(broken) as asked:
        with (
            open_ring(broken, asked) as ring,
            pytest.raises(RemoteProtocolError, match="head holds numbers that are not finite"),
        ):
            fetch_head(ring)
        with open_ring(broken, asked) as ring:
            weight, _ = fetch_head(ring, columns=(0, real - 1))
            assert weight.isfinite().all()


def test_padding_of_a_head_may_be_anything(model: TeacherModel, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = prepare(tiny_model("qwen3", seed=3), tiny_tokenizer().get_vocab(), name="padded")
    with torch.no_grad():
        padded.split.weight_VH[-1] = float("nan")
    size = padded.split.weight_VH.shape[0]
    announcing(monkeypatch, sha256=padded.head_columns_sha256(0, size), real_vocab=size - 1)
    for columns in (None, (size - 1, size)):
        with Teacher(padded) as asked, open_ring(padded, asked) as ring:
            weight, _ = fetch_head(ring, columns=columns)
            assert weight[-1].isnan().all()
