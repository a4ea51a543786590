"""A command's configuration: what is wrong with it is said in the user's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring.command import parse
from ring.core.errors import ConfigError
from student.config import TrainConfig


@pytest.mark.parametrize("line", ["data: train.jsonl", "teacher: tcp://127.0.0.1:5555"])
def test_a_single_value_in_the_file_where_a_list_belongs_is_said_so(tmp_path: Path, line: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match="--config: teacher, data, eval_data take lists"):
        parse(TrainConfig, ["--config", str(file)], prog="student.train", description="")


def test_other_wrong_values_are_not_taken_for_missing_lists(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: ten\n")
    with pytest.raises(ConfigError, match=r"steps.*ten") as refusal:
        parse(TrainConfig, ["--config", str(file)], prog="student.train", description="")
    assert "take lists" not in str(refusal.value)
