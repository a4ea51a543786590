"""The digest behind the head's bytes: hashed once for a range of columns, however often it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring.core.messages import HeadRequest
from teacher import forward
from teacher.fingerprint import head_sha256
from teacher.forward import TeacherModel
from teacher.load import prepare
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def model() -> TeacherModel:
    return prepare(tiny_model("qwen3", dtype=torch.float32), tiny_tokenizer().get_vocab(), name="tiny")


def test_a_range_of_columns_is_hashed_once_and_what_is_kept_is_bounded(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counting(weight_VH: Tensor, bias_V: Tensor | None) -> str:
        hashed.append(len(weight_VH))
        return head_sha256(weight_VH, bias_V)

    monkeypatch.setattr(forward, "head_sha256", counting)
    columns_bytes = model.head_columns(3, 90)[0].nbytes
    digest = bytearray()
    for offset in range(32):
        request = HeadRequest(vocab_start=3, vocab_end=90, offset=columns_bytes + offset, num_bytes=1)
        digest += b"".join(piece.numpy().tobytes() for piece in model.head_piece(request))
    assert hashed == [87]
    assert digest.hex() == head_sha256(*model.head_columns(3, 90))
    for end in range(1, 321):
        assert model.head_columns_sha256(0, end) == head_sha256(*model.head_columns(0, end))
    assert len(model._digests) == forward.MAX_DIGESTS
