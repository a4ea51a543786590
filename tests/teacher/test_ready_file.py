"""The file that tells where a teacher listens: whole or not there, and nobody else's file is touched for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring.core.errors import ConfigError
from teacher.serve import ServeConfig, _announce, _forget_ready_file


def test_the_ready_file_touches_nothing_beside_it(tmp_path: Path) -> None:
    ready, victim, link = tmp_path / "ready", tmp_path / "victim", tmp_path / "ready.tmp"
    victim.write_text("mine")
    link.symlink_to(victim)
    ready.write_text("of an earlier life")
    _forget_ready_file(str(ready))
    assert sorted(tmp_path.iterdir()) == sorted((victim, link))
    _announce(ServeConfig(ready_file=str(ready)), "tcp://127.0.0.1:7", "facts")
    assert ready.read_text() == "tcp://127.0.0.1:7\n"
    assert victim.read_text() == "mine"
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == sorted((ready, victim, link))


def test_a_ready_file_that_can_not_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ready").mkdir()
    with pytest.raises(ConfigError, match="can't be written"):
        _announce(ServeConfig(ready_file=str(tmp_path / "ready")), "tcp://127.0.0.1:7", "facts")
    assert list(tmp_path.iterdir()) == [tmp_path / "ready"]
