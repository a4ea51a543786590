"""What the loss's tests share."""

from __future__ import annotations

import pytest

import student.loss.products as products


@pytest.fixture(params=[False, True], ids=["no matrix units", "matrix units"])
def matrix_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of CPU, whichever the tests run on: without matrix units for 16 bits, float32-grade logits are made by
    float32 products; with them, by two 16-bit ones."""
    found = bool(request.param)
    monkeypatch.setattr(products, "has_matrix_units", lambda dtype: found)
    return found
