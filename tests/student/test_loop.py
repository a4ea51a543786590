"""A step that ends early: what is kept of the run, and what a resume finds."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ring.core.errors import ConfigError, DisaggKDError, TeacherLost
from student.checkpoint import CheckpointError
from student.data import MicroBatch, MicroBatchPlan, TokenDataset
from student.data.dataset import Sample
from student.loss import KDLoss
from student.metrics import MetricsFile
from student.model import DistilledStudent
from student.optim import Schedule, StudentOptimizer
from student.parallel.ranks import Ranks
from student.parallel.shares import Shares
from student.rng import RngState, capture_rng, restore_rng
from student.train.feed import Feed
from student.train.loop import Diverged, Interrupted, Loop, LoopSettings, StepFailed
from student.train.parts import Trained
from student.train.records import Records
from student.train.resume import Progress
from tests.student.conftest import student_in_memory

GRAD_ACCUM = 3


class BreakingFeed(Feed):
    """Gives microbatches until the one whose number is `breaks_at`, then raises `error`."""

    breaks_at: int
    error: Exception

    @contextmanager
    def states(self, batch: MicroBatch, *, stop_signal: Callable[[], int]) -> Iterator[torch.Tensor | None]:
        if self.counts.microbatches == self.breaks_at:
            raise self.error
        with super().states(batch, stop_signal=stop_signal) as states:
            yield states


class Trial:
    """A loop over labels alone, of a student with dropout, that fails in the midst of its second step."""

    def __init__(
        self,
        dataset: TokenDataset,
        root: Path,
        *,
        error: Exception | None = None,
        eval_data: TokenDataset | None = None,
        save: Callable[[Progress], None] | None = None,
        max_left_out: int = 0,
    ) -> None:
        """error: in the midst of the second step; None: there is none. save: instead of noting what is saved."""
        self.saved: list[tuple[int, RngState]] = []
        self.rng_after_step_one: list[RngState] = []
        loaded = student_in_memory("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
        module = DistilledStudent(
            loaded.model, loaded.head_spec, loss=KDLoss(kd_weight=0.0, ce_weight=1.0), precision="fp32"
        ).train()
        plan = MicroBatchPlan(
            row_counts=dataset.row_counts, lengths=dataset.lengths, batch_size=2, grad_accum=GRAD_ACCUM, max_steps=2
        )
        self._files = (
            _NotingFile(root / "metrics.jsonl", resume_step=0, note=self.rng_after_step_one),
            MetricsFile(root / "eval.jsonl", resume_step=0),
        )
        device = torch.device("cpu")
        ranks = Ranks.alone(device)
        shares = Shares(module, ranks)
        feed = Feed(plan, dataset, None, ranks=ranks, position=0, pad_id=0, device=device)
        if error is not None:
            feed = BreakingFeed(plan, dataset, None, ranks=ranks, position=0, pad_id=0, device=device)
            feed.breaks_at, feed.error = GRAD_ACCUM + 2, error
        self.loop = Loop(
            trained=Trained(module=module, shares=shares, optimizer=StudentOptimizer(shares.locals())),
            schedule=Schedule(peak_lr=1e-3, num_steps=2),
            plan=plan,
            feed=feed,
            ring=None,
            ranks=ranks,
            eval_data=eval_data,
            settings=LoopSettings(
                batch_size=2,
                clip_norm=1.0,
                max_left_out=max_left_out,
                checkpoint_every=0,
                eval_every=1,
                eval_samples=None,
                pad_id=0,
                device=device,
            ),
            progress=Progress(step=0, position=0),
            save=save or (lambda now: self.saved.append((now.step, capture_rng()))),
            records=Records(*self._files),
            eval_losses={},
        )

    def close(self) -> None:
        for file in self._files:
            file.close()


class _NotingFile(MetricsFile):
    """Notes the generators whenever a step has been taken."""

    def __init__(self, path: Path, *, resume_step: int, note: list[RngState]) -> None:
        super().__init__(path, resume_step=resume_step)
        self._note = note

    def write(self, record: Any) -> None:
        super().write(record)
        self._note.append(capture_rng())


@pytest.fixture
def dataset(ids_dataset: Callable[..., TokenDataset]) -> TokenDataset:
    rng = np.random.default_rng(3)
    documents: Sequence[list[int]] = [rng.integers(1, 320, 8).tolist() for _ in range(2 * 2 * GRAD_ACCUM)]
    return ids_dataset(*documents)


MakeTrial = Callable[..., Trial]


@pytest.fixture
def make_trial(dataset: TokenDataset, tmp_path: Path) -> Iterator[MakeTrial]:
    """Makes trials of the data set; their files are closed with the test."""
    with ExitStack() as files:

        def make(root: Path = tmp_path, **settings: Any) -> Trial:
            trial = Trial(dataset, root, **settings)
            files.callback(trial.close)
            return trial

        yield make


@pytest.mark.parametrize("error", [TeacherLost("gone"), RuntimeError("out of memory")], ids=["lost", "unknown"])
def test_a_step_that_is_not_taken_costs_no_step_before_it_and_no_random_number(
    make_trial: MakeTrial, error: Exception
) -> None:
    trial = make_trial(error=error)
    with pytest.raises(type(error), match=str(error)):
        trial.loop.run()
    assert [step for step, _ in trial.saved] == [1]
    assert trial.saved[0][1] == trial.rng_after_step_one[0]


@pytest.mark.parametrize("error", [ValueError("too long a text"), OverflowError("too large a number")])
@pytest.mark.parametrize(
    ("num_microbatches", "evaluating", "raised", "saved"),
    [
        (1, False, ConfigError, []),
        (GRAD_ACCUM + 1, False, StepFailed, [1]),
        (0, True, ConfigError, []),
        (GRAD_ACCUM, True, StepFailed, [1]),
    ],
)
def test_what_the_model_refuses_is_a_bad_setting_only_as_long_as_nothing_was_trained(
    make_trial: MakeTrial,
    dataset: TokenDataset,
    error: Exception,
    num_microbatches: int,
    evaluating: bool,
    raised: type[DisaggKDError],
    saved: list[int],
) -> None:
    """num_microbatches: that the feed has given by then."""
    trial = make_trial(eval_data=dataset)

    def refuse(module: torch.nn.Module, arguments: Any) -> None:
        if trial.loop._feed.counts.microbatches == num_microbatches and module.training is not evaluating:
            raise error

    trial.loop._module.register_forward_pre_hook(refuse)
    with pytest.raises(raised, match=str(error)) as refused:
        trial.loop.run()
    assert refused.value.exit_code == (2 if raised is ConfigError else 1)
    assert [step for step, _ in trial.saved] == saved


def test_an_error_within_the_update_leaves_no_checkpoint_of_half_of_it(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial(error=TeacherLost("not reached"))

    def torn(self: StudentOptimizer, *, lr: float) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr(StudentOptimizer, "step", torn)
    with pytest.raises(RuntimeError, match="torn"):
        trial.loop.run()
    assert trial.saved == []


def test_a_disk_that_is_full_when_the_teacher_is_lost_hides_neither(
    make_trial: MakeTrial, caplog: pytest.LogCaptureFixture
) -> None:
    def full(now: Progress) -> None:
        raise CheckpointError("checkpoint of step 1 could not be written: No space left on device")

    trial = make_trial(error=TeacherLost("a: it was killed; b: not heard from"), save=full)
    with pytest.raises(TeacherLost, match="a: it was killed; b: not heard from"):
        trial.loop.run()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "no checkpoint of step 1" in said
    assert "No space left on device" in said


class StoppingData(TokenDataset):
    """Held-out data whose reader is asked to end after so many samples."""

    def stop_after(self, num_samples: int) -> None:
        self.left = num_samples

    def sample(self, sample_id: int) -> Sample:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)
        return super().sample(sample_id)


@pytest.mark.parametrize(
    ("evaluation", "taken"), [(0, 0), (1, 1), (2, 2)], ids=["before the first step", "between steps", "at the end"]
)
def test_a_signal_in_the_midst_of_an_evaluation_is_heeded_at_once(
    make_trial: MakeTrial, dataset: TokenDataset, evaluation: int, taken: int
) -> None:
    """Each evaluation reads all samples, two at a time; the signal comes with the third sample of one of them."""
    held_out = StoppingData(dataset._parts, dataset.report)
    held_out.stop_after(evaluation * held_out.num_samples + 3)
    trial = make_trial(eval_data=held_out)
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM after step {taken}"):
        trial.loop.run()
    assert held_out.left > -4, "no more than the microbatch under way was read"
    assert [step for step, _ in trial.saved] == ([taken] if taken else [])
    assert sorted(trial.loop.eval_losses) == list(range(evaluation)), "half an evaluation is none"


class Poisoned:
    """Makes the gradient of the trial's second step, and of all after it, not finite."""

    def __init__(self, trial: Trial) -> None:
        self.weights_after_step_one: list[torch.Tensor] = []
        parameter = next(trial.loop._module.parameters())

        def poison(gradient: torch.Tensor) -> torch.Tensor:
            if trial.loop.progress.step == 0:
                return gradient
            if not self.weights_after_step_one:
                self.weights_after_step_one.append(parameter.detach().clone())
            return gradient * float("inf")

        parameter.register_hook(poison)
        self.parameter = parameter


def test_a_step_whose_gradient_is_not_finite_is_not_taken_and_said_to_be_left_out_on_demand(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    poisoned = Poisoned(trial)
    with pytest.raises(
        Diverged, match=r"^step 2: the gradient norm is nan, .*; allowed: --resume with --max-left-out 1"
    ):
        trial.loop.run()
    assert [step for step, _ in trial.saved] == [1]
    assert torch.equal(poisoned.parameter, poisoned.weights_after_step_one[0])


def test_a_step_that_is_left_out_changes_nothing_and_is_counted(
    make_trial: MakeTrial, dataset: TokenDataset, tmp_path: Path
) -> None:
    trial = make_trial(max_left_out=1)
    poisoned = Poisoned(trial)
    trial.loop.run()
    assert torch.equal(poisoned.parameter, poisoned.weights_after_step_one[0])
    assert (trial.loop.progress.step, trial.loop.progress.position) == (2, dataset.num_samples)
    assert trial.loop.progress.samples_left_out == dataset.num_samples // 2
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["samples_left_out"], second["samples_left_out"]) == (0, dataset.num_samples // 2)
    assert second["grad_norm"] is None, "JSON knows no NaN"


def test_an_error_after_the_update_leaves_a_checkpoint_with_the_generators_of_that_step(
    make_trial: MakeTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quiet").mkdir()
    quiet, trial = make_trial(tmp_path / "quiet"), make_trial()
    start = capture_rng()
    quiet.loop.run()
    restore_rng(start)

    def no_memory(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("student.train.loop.over_ranks", no_memory)
    with pytest.raises(MemoryError):
        trial.loop.run()
    assert [step for step, _ in trial.saved] == [1]
    assert trial.saved[0][1] == quiet.rng_after_step_one[0]


def test_how_many_were_left_out_in_a_row_is_part_of_where_a_run_is(make_trial: MakeTrial) -> None:
    """A run that was ended and resumed in between is the run at once."""
    kept: list[Progress] = []
    trial = make_trial(max_left_out=1, save=lambda now: kept.append(dataclasses.replace(now)))
    Poisoned(trial)
    trial.loop.run()
    assert kept[-1].steps_left_out_in_a_row == 1
    resumed = make_trial(max_left_out=1)
    resumed.loop.progress.steps_left_out_in_a_row = kept[-1].steps_left_out_in_a_row
    resumed.loop.progress.step = 0
    next(resumed.loop._module.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(Diverged, match=r"^step 1: .*--max-left-out 2 leaves it out"):
        resumed.loop.run()


def test_the_flag_that_is_named_helps_also_where_more_were_left_out_than_it_allows(make_trial: MakeTrial) -> None:
    trial = make_trial()
    trial.loop.progress.steps_left_out_in_a_row = 3
    Poisoned(trial)
    next(trial.loop._module.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(Diverged, match=r"--max-left-out 4 leaves it out"):
        trial.loop.run()
