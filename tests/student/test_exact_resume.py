"""A resume is the same run to the bit: weights, optimizer, generators and data go on where they were."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.cuda._utils import _get_device_index

from ring.core.errors import ConfigError
from student.checkpoint import Checkpoint, TrainState, open_checkpoint, write_checkpoint
from student.config import TrainConfig
from student.data import MicroBatchPlan, TokenDataset, build_microbatch
from student.load import LoadedStudent, load_student
from student.loss import KDLoss
from student.model import DistilledStudent
from student.optim import Schedule, StudentOptimizer
from student.parallel.ranks import Ranks
from student.parallel.shares import Shares
from student.rng import RngState, capture_rng, restore_rng
from student.train.resume import RunFiles, checkpoint_to_resume, identify
from tests.student.conftest import student_in_memory, teacher_head, teacher_states
from tests.tiny_models import tiny_model

MakeDataset = Callable[..., TokenDataset]


class Run:
    """A training run over a data set that can be cut after any step."""

    def __init__(self, loaded: LoadedStudent, dataset: TokenDataset, *, resume: Checkpoint | None = None) -> None:
        self.loaded = loaded
        self.dataset = dataset
        self.module = DistilledStudent(
            loaded.model, loaded.head_spec, loss=KDLoss(), teacher_head=teacher_head(), precision="fp32"
        )
        self.module.train()
        self.optimizer = StudentOptimizer(loaded.model)
        self.schedule = Schedule(peak_lr=3e-3, num_steps=6, num_warmup_steps=2)
        self.plan = MicroBatchPlan(
            row_counts=dataset.row_counts, lengths=dataset.lengths, batch_size=2, grad_accum=2, epochs=2
        )
        self.step = self.position = 0
        if resume is not None:
            self.step, self.position = resume.state.step, resume.state.position
            self.optimizer.load_state_tensors(resume.optimizer_tensors())
            restore_rng(resume.state.rng[0])

    def train(self, num_steps: int) -> list[tuple[float, float]]:
        losses = []
        for step in self.plan.steps(self.position):
            self.optimizer.zero_grad()
            loss = 0.0
            for planned in step.microbatches:
                batch = build_microbatch(self.dataset, planned)
                output = self.module(
                    **batch.inputs("cpu"), teacher_hidden=teacher_states(batch), num_rows=step.num_rows
                )
                output.loss.backward()
                loss += float(output.loss.detach())
            norm = Shares(self.loaded.model, Ranks.alone(torch.device("cpu"))).clip(max_norm=1.0)
            self.optimizer.step(lr=self.schedule.lr_at(step.step))
            self.step, self.position = step.step, step.next_position
            losses.append((loss, norm))
            if len(losses) == num_steps:
                break
        return losses

    def save(self, root: Path) -> Path:
        state = TrainState(step=self.step, position=self.position, config_hash="c", rng=(capture_rng(),))
        return write_checkpoint(
            root,
            state,
            model=self.loaded.model,
            optimizer_tensors=self.optimizer.state_tensors(),
            tokenizer=self.loaded.tokenizer,
        )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"attention_dropout": 0.3}),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
        ("qwen3_5_moe", {}),
    ],
    ids=["qwen3", "qwen3-dropout", "gpt2-dropout", "qwen3_5_moe"],
)
def test_three_steps_and_three_resumed_are_six_to_the_bit(
    family: str, options: dict[str, Any], tmp_path: Path, ids_dataset: MakeDataset
) -> None:
    rng = np.random.default_rng(2)
    dataset = ids_dataset(*(rng.integers(1, 320, n).tolist() for n in rng.integers(3, 14, 10)))
    torch.manual_seed(4)
    whole = Run(student_in_memory(family, **options), dataset)
    whole_losses = whole.train(6)
    assert len(whole_losses) == 6
    assert whole.plan.num_steps == 6

    torch.manual_seed(4)
    first = Run(student_in_memory(family, **options), dataset)
    losses = first.train(3)
    path = first.save(tmp_path / "checkpoints")
    torch.manual_seed(99)  # another process starts with other generators
    random.seed(99)
    found = open_checkpoint(path)
    second = Run(load_student(str(found.model_dir)), dataset, resume=found)
    assert losses + second.train(6) == whole_losses
    for name, parameter in whole.loaded.model.named_parameters():
        assert torch.equal(parameter, second.loaded.model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("changes", "num_ranks", "said"),
    [
        ({"fsdp": True}, 2, "--fsdp was False, now True"),
        ({"vocab_parallel": 2}, 2, "--vocab-parallel was 1, now 2"),
        (
            {"batch_size": 4},
            4,
            "the ranks were 2, now 4, and a --deterministic run goes on on as many only",
        ),
        ({"batch_size": 16}, 1, "the ranks were 2, now 1, and"),
    ],
)
def test_another_cut_over_ranks_gives_other_bits_and_is_refused_where_they_count(
    tmp_path: Path, changes: dict[str, Any], num_ranks: int, said: str
) -> None:
    def world_of(size: int) -> Ranks:
        ranks = Ranks.alone(torch.device("cpu"))
        ranks.world_size = size
        return ranks

    state = TrainState(step=1, position=16, config_hash="c", rng=(capture_rng(),))
    for deterministic in (True, False):
        files = RunFiles(tmp_path / str(deterministic))
        path = write_checkpoint(files.checkpoints, state, model=tiny_model(), optimizer_tensors={})
        began = TrainConfig(student="s", data=("d",), deterministic=deterministic, resume=True)
        identify(began, files, world_of(2), [], resumes=False, teacher_fingerprint=None)
        assert checkpoint_to_resume(began, files, world_of(2)) is not None
        other = replace(began, **changes)
        if deterministic:
            with pytest.raises(ConfigError, match=f"--resume: {said}.*; allowed: the settings that the run began with"):
                checkpoint_to_resume(other, files, world_of(num_ranks))
        else:
            found = checkpoint_to_resume(other, files, world_of(num_ranks))
            assert found is not None
            assert found.path == path


def test_generators_go_on_where_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)
    np.random.standard_normal()
    state = RngState.from_json(json.loads(json.dumps(capture_rng().to_json())))

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(), float(torch.randn(()))]

    expected = draw()
    draw()
    restore_rng(state)
    assert draw() == expected


class FakeDevices:
    """Stands for torch.cuda with two devices, one of which is current. Proves nothing about real generators."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.generators = [torch.Generator().manual_seed(7 + number) for number in range(2)]
        self.current = 0
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", lambda: self.generators[self.current].get_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state: self.generators[self.current].set_state(state))

    def draw(self) -> list[float]:
        return [float(number) for number in torch.rand(3, generator=self.generators[self.current])]


def test_a_rank_goes_on_with_its_generator_whatever_the_number_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices of one host, or four of each of two: the same ranks, other numbers."""
    devices = FakeDevices(monkeypatch)
    devices.current = 1
    devices.draw()
    state = RngState.from_json(json.loads(json.dumps(capture_rng().to_json())))
    expected = devices.draw()
    devices.current = 0
    restore_rng(state)
    assert devices.draw() == expected


@pytest.mark.parametrize("num_devices", [0, 1, 2])
def test_generators_of_a_checkpoint_that_has_all_devices_are_read_where_it_is_clear_whose_they_are(
    num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RngState.from_json(capture_rng().to_json() | {"torch_cuda": ["YWJj"] * num_devices})
    assert RngState.from_json(json.loads(json.dumps(state.to_json()))) == state
    restore_rng(state)  # this process has no such device
    FakeDevices(monkeypatch)
    with pytest.raises(ConfigError, match="those of 2 CUDA devices") if num_devices == 2 else nullcontext():
        restore_rng(replace(state, torch_cuda=state.torch_cuda if num_devices == 2 else ()))


@pytest.mark.parametrize(("device", "wanted"), [("cuda", []), ("cuda:1", [1]), ("cpu", [])])
def test_the_device_of_a_trainer_is_the_current_one(
    device: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--device auto and cuda have no number, which torch does not take."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(_get_device_index(device)))
    Ranks.alone(torch.device(device))
    assert chosen == wanted
