"""The one tiny teacher that all tests of the ring ask."""

from __future__ import annotations

import pytest

from teacher.forward import TeacherModel
from teacher.load import prepare
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def model() -> TeacherModel:
    return prepare(tiny_model("qwen3", seed=3), tiny_tokenizer().get_vocab(), name="tiny")


@pytest.fixture(scope="session")
def other_model() -> TeacherModel:
    """The same tokenizer and sizes, other weights."""
    return prepare(tiny_model("qwen3", seed=4), tiny_tokenizer().get_vocab(), name="other")
