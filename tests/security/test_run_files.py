"""The files of a run, bent in every way: what is read back is what was written, or one of our errors says why not.

Files whose checksums are right all the same are among them: another version wrote them, or somebody meant well.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring.core.errors import DisaggKDError
from student.checkpoint import OPTIMIZER_FILE, STATE_FILE, open_checkpoint
from student.config import TrainConfig
from student.export import export_checkpoint
from student.train.run import train
from tests.security.test_decoders import MANY, fuzz
from tests.tiny_models import build_tiny_checkpoint

NUM_STEPS, CHECKPOINT_STEP = 4, 2
whole_runs = settings(fuzz, max_examples=max(15, MANY // 8))  # each trains for a moment

scalars = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=5)
    | st.sampled_from([2**63, -(2**63), 10**400, "ranks", "1e999", "\x1b[2J", "../../x"])
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
#: What no parser of ours may choke on.
NASTY = (b"", b"\0" * 50, b"[" * 100_000, b'{"step": 1e999}', b'{"step": NaN}', b"\xff\xfe{}", b"null", b"7")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A run on labels alone that was stopped after its second step, as far as its files tell."""
    root = tmp_path_factory.mktemp("run")
    data = root / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"Slot {i} holds {i * i} rows."}) + "\n" for i in range(16)))
    config = TrainConfig(
        student=str(build_tiny_checkpoint(root / "student", "qwen3", seed=2)),
        data=(str(data),),
        eval_data=(str(data),),
        eval_every=2,
        eval_samples=2,
        cache_dir=str(root / "cache"),
        kd_weight=0.0,
        ce_weight=1.0,
        steps=NUM_STEPS,
        batch_size=2,
        max_length=32,
        precision="fp32",
        checkpoint_every=CHECKPOINT_STEP,
        threads=1,
        deterministic=True,
        out=str(root / "whole"),
    )
    threads = torch.get_num_threads()
    train(config)
    stopped = root / "stopped"
    shutil.copytree(root / "whole", stopped)
    shutil.rmtree(stopped / "checkpoints" / f"step-{NUM_STEPS:08d}")
    shutil.rmtree(stopped / "model")
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    return config, stopped


@pytest.fixture(scope="module")
def copies(run: tuple[TrainConfig, Path]) -> Callable[[], tuple[TrainConfig, Path]]:
    """Makes a copy of that run, and the configuration that resumes it."""
    config, stopped = run
    numbers = iter(range(10**9))

    def make() -> tuple[TrainConfig, Path]:
        out = stopped.parent / f"copy-{next(numbers)}"
        shutil.copytree(stopped, out)
        return dataclasses.replace(config, out=str(out), resume=True), out

    return make


def resumes_or_refuses(config: TrainConfig, out: Path) -> bool:
    """Whether it came to its end, with every step once; else it was refused by an error of ours."""
    try:
        train(config)
    except DisaggKDError as error:
        assert str(error).strip()  # noqa: PT017 - or it resumes
        print(error)
        return False
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps][-2:] == [CHECKPOINT_STEP + 1, NUM_STEPS]
    assert (out / "model" / "config.json").exists()
    return True


@pytest.fixture
def sane() -> Iterator[None]:
    """What a training in this process changes is put back."""
    threads, is_exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_exact)


lines = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(NASTY),
    st.dictionaries(st.sampled_from(["step", "eval_loss", "loss", "x"]), values, max_size=4).map(
        lambda record: json.dumps(record).encode()
    ),
)


@pytest.mark.usefixtures("sane")
@given(name=st.sampled_from(["metrics.jsonl", "eval.jsonl"]), bad=lines, at=st.integers(0, 4), ends=st.booleans())
@whole_runs
def test_whatever_stands_in_the_metrics_a_run_resumes_or_is_refused(
    copies: Callable[[], tuple[TrainConfig, Path]], name: str, bad: bytes, at: int, ends: bool
) -> None:
    config, out = copies()
    kept = (out / name).read_bytes().splitlines(keepends=True)
    kept.insert(at, bad + (b"\n" if ends else b""))
    (out / name).write_bytes(b"".join(kept))
    # Only what is beside the checkpoint is damaged: nothing of it is worth a refusal.
    assert resumes_or_refuses(config, out)
    shutil.rmtree(out)


@pytest.mark.usefixtures("sane")
@given(
    content=st.sampled_from(NASTY)
    | values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["ranks", "batch_size", "grad_accum", "lr", "deterministic", "teacher_fingerprint", "run_id"]),
        values,
        min_size=1,
        max_size=4,
    ),
    name=st.sampled_from(["run.json", "summary.json"]),
)
@whole_runs
def test_whatever_stands_in_run_json_a_run_resumes_or_is_refused(
    copies: Callable[[], tuple[TrainConfig, Path]], content: bytes | dict[str, Any], name: str
) -> None:
    config, out = copies()
    if isinstance(content, dict):
        content = json.dumps(json.loads((out / name).read_text()) | content).encode()
    (out / name).write_bytes(content)
    resumed = resumes_or_refuses(config, out)
    assert resumed or name == "run.json", "nobody reads the summary"
    shutil.rmtree(out)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value[:4]):
            yield from places(inner, (*path, place))


def signed(state: dict[str, Any]) -> str:
    """The text of a state.json whose own checksum is right."""
    state.pop("state_sha256", None)
    state["state_sha256"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    return json.dumps(state)


def change(state: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """One thing in it is another, or gone."""
    bent = copy.deepcopy(state)
    *path, last = data.draw(st.sampled_from([place for place in places(bent) if place]), label="where")
    inner: Any = bent
    for step in path:
        inner = inner[step]
    if data.draw(st.booleans(), label="gone"):
        del inner[last]
    else:
        inner[last] = data.draw(values, label="what")
    return bent


@pytest.mark.usefixtures("sane")
@given(data=st.data())
@whole_runs
def test_a_bent_state_of_a_checkpoint_is_refused_or_resumed_from(
    copies: Callable[[], tuple[TrainConfig, Path]], data: st.DataObject
) -> None:
    config, out = copies()
    file = out / "checkpoints" / f"step-{CHECKPOINT_STEP:08d}" / STATE_FILE
    state = json.loads(file.read_text())
    file.write_text(signed(change(state, data)))
    resumes_or_refuses(config, out)
    shutil.rmtree(out)


def bent_tensors(tensors: dict[str, torch.Tensor], data: st.DataObject) -> dict[str, torch.Tensor]:
    bent = dict(tensors)
    name = data.draw(st.sampled_from(sorted(bent)), label="which")
    tensor = bent.pop(name)
    match data.draw(st.sampled_from(["gone", "renamed", "dtype", "shape", "nan", "empty"]), label="how"):
        case "renamed":
            bent[data.draw(st.sampled_from(["", "step", "exp_avg.", "exp_avg.x", "x" * 300]))] = tensor
        case "dtype":
            bent[name] = tensor.to(data.draw(st.sampled_from([torch.int64, torch.bool, torch.float64, torch.float16])))
        case "shape":
            bent[name] = tensor.reshape(-1)[:1].clone() if tensor.ndim else tensor.repeat(3)
        case "nan":
            bent[name] = torch.full_like(tensor, float("nan"))
        case "empty":
            bent[name] = tensor.new_empty(0)
        case _:
            pass
    return bent


@pytest.mark.usefixtures("sane")
@given(data=st.data())
@whole_runs
def test_a_bent_optimizer_state_is_refused_or_resumed_from(
    copies: Callable[[], tuple[TrainConfig, Path]], data: st.DataObject
) -> None:
    config, out = copies()
    directory = out / "checkpoints" / f"step-{CHECKPOINT_STEP:08d}"
    file = directory / OPTIMIZER_FILE
    if data.draw(st.booleans(), label="bytes"):
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, min(len(content), 2000) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(content)
    else:
        safetensors.torch.save_file(bent_tensors(safetensors.torch.load_file(file), data), file)
    state = json.loads((directory / STATE_FILE).read_text())
    entry = {"num_bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    state["files"][OPTIMIZER_FILE] = entry
    (directory / STATE_FILE).write_text(signed(state))
    resumes_or_refuses(config, out)
    shutil.rmtree(out)


@given(data=st.data())
@fuzz
def test_whatever_is_exported_is_a_model_or_refused(
    copies: Callable[[], tuple[TrainConfig, Path]], data: st.DataObject
) -> None:
    """Of a checkpoint whose files are what they were written as, by its own account."""
    _, out = copies()
    directory = out / "checkpoints" / f"step-{CHECKPOINT_STEP:08d}"
    state = json.loads((directory / STATE_FILE).read_text())
    if data.draw(st.booleans(), label="state"):
        state = change(state, data)
        (directory / STATE_FILE).write_text(signed(state))
    else:
        name = data.draw(st.sampled_from([STATE_FILE, "model/config.json", "model/model.safetensors"]))
        (directory / name).write_bytes(data.draw(st.sampled_from(NASTY) | st.binary(max_size=50)))
    target = out / "exported"
    try:
        export_checkpoint(out, target)
    except DisaggKDError:
        assert not target.exists()
    else:
        assert (target / "config.json").read_bytes() == (directory / "model" / "config.json").read_bytes()
        open_checkpoint(directory)
    shutil.rmtree(out)
