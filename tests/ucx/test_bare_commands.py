"""`teacher.serve --transport ucx` and `student.train` with no other flag, on what `make demo` leaves behind."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cable import Cable, NoRights
from tests.rights import lack
from tests.system.processes import Command, curve
from tests.tiny_models import build_tiny_checkpoint

NUM_SAMPLES = 20
#: The bare student takes texts of up to 512 tokens.
MAX_POSITIONS = 512


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A directory in which something like the demo ran, only smaller."""
    root = tmp_path / "runs" / "demo"
    build_tiny_checkpoint(root / "teacher", "qwen3", seed=1, hidden_size=48, max_position_embeddings=MAX_POSITIONS)
    trained = build_tiny_checkpoint(tmp_path / "student", "qwen3", seed=2, max_position_embeddings=MAX_POSITIONS)
    (root / "student").mkdir()
    for path in trained.iterdir():
        if path.suffix == ".json":  # configuration and tokenizer: it starts from random weights
            shutil.copy(path, root / "student")
    (root / "corpus").mkdir()
    texts = [f"Slot {i} holds {i * i} rows for the next step, and the ring turns." for i in range(NUM_SAMPLES)]
    (root / "corpus" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


@pytest.fixture
def private_network() -> Iterator[list[str]]:
    """Namespaces in which nobody else has the default port, nor is kept from it."""
    try:
        cable = Cable(seed=0)
    except NoRights as error:
        lack(f"no network namespaces: {error}")
    yield cable.namespaces[0]
    cable.close()


def test_the_bare_commands_distil_the_demo_over_ucx(demo: Path, private_network: list[str]) -> None:
    teacher = Command("teacher.serve", "--transport", "ucx", cwd=demo, namespaces=private_network)
    student = Command("student.train", cwd=demo, namespaces=private_network)
    try:
        student.succeed()
        out = demo / "runs" / "train"
        summary = json.loads((out / "summary.json").read_text())
        assert list(summary["transports"].values()) == ["ucx"]
        assert summary["ending"] == "finished"
        assert curve(out)[-1]["position"] == NUM_SAMPLES
        teacher.send(signal.SIGTERM)
        teacher.succeed()
    finally:
        student.end()
        teacher.end()
