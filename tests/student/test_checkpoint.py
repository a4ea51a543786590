"""Checkpoints: whole or absent, verified, and a resume that is the same run to the bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ring.core.errors import ConfigError
from student import checkpoint as checkpoint_module
from student import durable
from student.checkpoint import (
    CheckpointError,
    TrainState,
    export_model,
    latest_checkpoint,
    open_checkpoint,
    set_aside_later,
    write_checkpoint,
)
from student.data import TokenDataset
from student.load import load_student
from student.rng import capture_rng
from tests.limits import descriptors_below
from tests.tiny_models import tiny_model, tiny_tokenizer

MakeDataset = Callable[..., TokenDataset]


def state_at(step: int, position: int = 0) -> TrainState:
    return TrainState(step=step, position=position, config_hash="c", rng=(capture_rng(),))


def write(root: Path, step: int, *, model: Any = None, **options: Any) -> Path:
    model = model or tiny_model(seed=step)
    tensors = {"exp_avg.x": torch.full((3,), float(step)), "step.x": torch.tensor(float(step))}
    return write_checkpoint(root, state_at(step, 10 * step), model=model, optimizer_tensors=tensors, **options)


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


# --- what is on disk -----------------------------------------------------------------------------


def test_model_directory_loads_with_from_pretrained_in_the_very_dtype_and_bits(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = tiny_model(dtype=dtype)
        path = write(tmp_path / str(dtype), 1, model=model, tokenizer=tiny_tokenizer())
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
        assert loaded.dtype == dtype
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), name
        tokenizer = transformers.AutoTokenizer.from_pretrained(path / "model")
        assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
        assert tokenizer.chat_template == tiny_tokenizer().chat_template


def test_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    state = TrainState(
        step=40,
        position=1234567890123,
        config_hash="abc",
        rng=(capture_rng(), capture_rng()),
    )
    tensors = {"exp_avg.a": torch.randn(2, 3, dtype=torch.float64), "step.a": torch.tensor(3.0)}
    path = write_checkpoint(tmp_path, state, model=tiny_model(), optimizer_tensors=tensors)
    assert path.name == "step-00000040"
    found = open_checkpoint(path)
    assert found.state == state
    assert found.optimizer_tensors().keys() == tensors.keys()
    for name, tensor in found.optimizer_tensors().items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.dtype == tensors[name].dtype


def test_nothing_is_pickled_and_everything_is_readable_by_the_group(tmp_path: Path) -> None:
    old_mask = os.umask(0o022)
    try:
        path = write(tmp_path, 1, tokenizer=tiny_tokenizer())
    finally:
        os.umask(old_mask)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".jinja"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o644}


def test_writing_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1)
    assert capfd.readouterr() == ("", "")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_keeping_counts_no_checkpoint_of_a_later_step(tmp_path: Path) -> None:
    # A torn one of an abandoned lineage must not push out the only whole one.
    (tmp_path / "step-00000050").mkdir()
    write(tmp_path, 40, keep=1)
    assert names(tmp_path) == ["step-00000040", "step-00000050"]


def test_a_damaged_checkpoint_pushes_out_no_whole_one(tmp_path: Path) -> None:
    write(tmp_path, 10)
    os.truncate(write(tmp_path, 20) / "optimizer.safetensors", 10)
    write(tmp_path, 30, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    write(tmp_path, 40, keep=2)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_the_same_step_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, 10, model=tiny_model(seed=1))
    path = write(tmp_path, 10, model=tiny_model(seed=2))
    assert names(tmp_path) == ["step-00000010"]
    loaded = load_student(str(open_checkpoint(path).model_dir))
    assert torch.equal(loaded.model.lm_head.weight, tiny_model(seed=2).lm_head.weight)


def test_export_replaces_the_model_of_a_directory_at_once(tmp_path: Path) -> None:
    target = tmp_path / "final"
    export_model(target, model=tiny_model(seed=1), tokenizer=tiny_tokenizer())
    (target / "stray").write_text("of an older export")
    export_model(target, model=tiny_model(seed=2), tokenizer=tiny_tokenizer())
    assert "stray" not in names(target)
    assert names(tmp_path) == ["final"]
    assert torch.equal(load_student(str(target)).model.lm_head.weight, tiny_model(seed=2).lm_head.weight)


# --- torn and damaged ----------------------------------------------------------------------------


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _edit_state(path: Path, **changes: Any) -> None:
    file = path / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _link_to_itself(path: Path) -> None:
    weights = path / "model/model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "cut state": (lambda path: os.truncate(path / "state.json", 100), "state.json can't be read"),
    "nested state": (lambda path: (path / "state.json").write_text("[" * 100_000), "state.json can't be read"),
    "empty directory": (lambda path: shutil.rmtree(path) or path.mkdir(), "state.json is missing"),
    "a loop of links": (_link_to_itself, "model.safetensors can't be read"),
    "empty state": (lambda path: (path / "state.json").write_text("[]"), "state.json can't be read"),
    "edited position": (lambda path: _edit_state(path, position=7), "state.json is damaged"),
    "other format": (lambda path: _edit_state(path, format_version=99), "format 99; allowed: 1"),
    "no weights": (lambda path: (path / "model/model.safetensors").unlink(), "model.safetensors is missing"),
    "cut weights": (lambda path: os.truncate(path / "model/model.safetensors", 1000), "has 1000 bytes"),
    "flipped bit": (lambda path: _flip_a_bit(path / "optimizer.safetensors"), "optimizer.safetensors is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_its_reason_and_refused_by_name(case: str, tmp_path: Path) -> None:
    damage, reason = DAMAGE[case]
    older, newer = write(tmp_path, 10), write(tmp_path, 20)
    damage(newer)
    found, skipped = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.path == older
    assert found.state.position == 100
    assert [entry.path for entry in skipped] == [newer]
    assert reason in skipped[0].reason
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(newer)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_outside_of_a_checkpoint_are_never_read(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    state = json.loads((path / "state.json").read_text())
    del state["state_sha256"]
    state["files"]["../secret"] = {"num_bytes": 1, "sha256": "0"}
    state["state_sha256"] = checkpoint_module._state_digest(state)
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="lies outside"):
        open_checkpoint(path)


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") == (None, ())
    with pytest.raises(ConfigError, match="no such directory"):
        open_checkpoint(tmp_path / "step-00000010")


def test_a_resume_from_an_earlier_one_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step, keep=9)
    set_aside_later(tmp_path, step=10)
    found, _ = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.state.step == 10
    write(tmp_path, 20, keep=9)
    set_aside_later(tmp_path, step=10)
    assert names(tmp_path) == [
        "abandoned-step-00000020",
        "abandoned-step-00000020-2",
        "abandoned-step-00000030",
        "step-00000010",
    ]


# --- disks that fail, processes that die ---------------------------------------------------------

_WRITE_UNDER_A_LIMIT = """
    import resource, sys
    from pathlib import Path
    from tests.student.test_checkpoint import write
    from student.checkpoint import CheckpointError
    write(Path(sys.argv[1]), 10)
    # No file may grow past this: like a full disk, the write itself fails, in the midst of the weights.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    try:
        write(Path(sys.argv[1]), 20)
    except CheckpointError as error:
        print(error)
        sys.exit(7)
"""


def _run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=120
    )


def test_a_write_that_fails_half_way_leaves_the_previous_one_and_nothing_else(tmp_path: Path) -> None:
    done = _run_python(_WRITE_UNDER_A_LIMIT, str(tmp_path))
    assert done.returncode == 7, done.stderr
    assert "checkpoint of step 20 could not be written" in done.stdout
    assert os.strerror(errno.EFBIG) in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert names(tmp_path) == ["step-00000010"]
    open_checkpoint(tmp_path / "step-00000010")


def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)
    before = content(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"bytes needed, 1000 free"):
        write(tmp_path, 20)
    assert content(tmp_path) == before


def test_a_failing_rename_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 10, model=tiny_model(seed=1))
    before = content(path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-"):
            raise OSError(errno.EIO, "disk on fire")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="disk on fire"):
        write(tmp_path, 10, model=tiny_model(seed=2))
    assert names(tmp_path) == ["step-00000010"]
    assert content(path) == before


@pytest.mark.parametrize("steps", [(10,), (10, 10), (20, 10)])
def test_a_directory_whose_names_do_not_reach_the_disk_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    """Whatever the new one was to replace: nothing, one of the same name, or the newest."""
    *written, last = steps
    for step in written:
        write(tmp_path, step, model=tiny_model(seed=1))
    tmp_path.mkdir(exist_ok=True)
    before = content(tmp_path)
    sync = durable.sync

    def failing(path: Path) -> None:
        if path == tmp_path and (tmp_path / f"step-{last:08d}").exists() and not list(tmp_path.glob(".writing-*")):
            raise OSError(errno.EIO, "disk on fire")
        sync(path)

    monkeypatch.setattr(durable, "sync", failing)
    with pytest.raises(CheckpointError, match="disk on fire"):
        write(tmp_path, last, model=tiny_model(seed=2))
    assert content(tmp_path) == before


def test_what_a_failed_write_left_for_want_of_descriptors_is_said_and_goes_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(directory: Path) -> None:
        (directory / "shard").write_bytes(b"half")
        stack.enter_context(descriptors_below(0))
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with ExitStack() as stack, pytest.raises(OSError, match="Too many open files"):
        durable.write_directory(tmp_path / "step-1", fill, needed_bytes=4)
    assert ".writing-step-1 could not be removed" in caplog.text
    durable.write_directory(tmp_path / "step-1", lambda directory: None, needed_bytes=0)
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("name", [".writing-step-00000020", ".removing-step-00000020"])
def test_a_file_where_a_directory_is_to_be_written_is_removed_like_one(tmp_path: Path, name: str) -> None:
    write(tmp_path, 10)
    (tmp_path / name).write_text("of nobody")
    write(tmp_path, 20)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_writing_leaves_the_mask_of_the_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads make files meanwhile."""

    def refused(mask: int) -> int:
        raise AssertionError(f"umask {mask:#o} was set")

    monkeypatch.setattr(os, "umask", refused)
    write(tmp_path, 1)


_DIE_WHILE_WRITING = """
    import os, sys, signal
    from pathlib import Path
    from tests.student.test_checkpoint import write
    import student.durable
    write(Path(sys.argv[1]), 10)
    # The last moment at which the new one is not there yet.
    student.durable._put_in_place = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    write(Path(sys.argv[1]), 20)
"""


def test_a_process_killed_while_writing_leaves_the_previous_one_and_is_cleaned_up_after(tmp_path: Path) -> None:
    done = _run_python(_DIE_WHILE_WRITING, str(tmp_path))
    assert done.returncode == -9, done.stderr
    assert names(tmp_path) == [".writing-step-00000020", "step-00000010"]
    found, skipped = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.state.step == 10
    assert skipped == ()
    write(tmp_path, 30)
    assert names(tmp_path) == ["step-00000010", "step-00000030"]
