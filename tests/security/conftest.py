"""Key directories of two houses that don't know each other, and the processes of the system tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ring.auth import Keyring, make_keyrings
from tests.system.conftest import (  # noqa: F401 - fixtures
    endpoint,
    inputs,
    processes,
    quiet_curve,
    start_student,
    start_teacher,
)


@dataclass(frozen=True)
class House:
    """A teacher and a student that trust each other."""

    teacher: Keyring
    student: Keyring


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(*make_keyrings(tmp_path / "house", ("teacher", "student")))


@pytest.fixture
def strangers(tmp_path: Path) -> House:
    return House(*make_keyrings(tmp_path / "strangers", ("teacher", "student")))
