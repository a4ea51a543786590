"""The training loop: steps over a feed, metrics, evaluation, checkpoints, and an orderly end whatever happens."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from ring.core.errors import ConfigError, DisaggKDError
from ring.prefetch import Ring
from student.checkpoint import CheckpointError
from student.data import MicroBatch, MicroBatchPlan, PlannedStep, TokenDataset, sequential_microbatches
from student.loss import KDOutput
from student.metrics import MetricsFile, Reporter, StepMetrics, peak_rss_bytes
from student.model import DistilledStudent, evaluate
from student.optim import Schedule, StudentOptimizer, clip_gradients
from student.rng import RngState, capture_rng, restore_rng
from student.train.feed import Feed, Stopped

logger = logging.getLogger(__name__)


class Interrupted(DisaggKDError):
    """A signal asked for the end; the step under way was finished and a checkpoint written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; --resume goes on from there")
        self.exit_code = 128 + number


class Diverged(DisaggKDError):
    """The gradient is not finite; the step was not taken."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """clip_norm: None only measures. *_every: steps; 0 = never between start and end. eval_samples: None = all."""

    batch_size: int
    clip_norm: float | None
    checkpoint_every: int
    eval_every: int
    eval_samples: int | None
    pad_id: int
    device: torch.device


@dataclass(kw_only=True)
class Progress:
    """Where the run is: the last step taken, and the position that a checkpoint of it stores."""

    step: int
    position: int
    samples: int = 0
    rows: int = 0


@dataclass(frozen=True)
class RingTotals:
    """Running sums of the ring that steps report differences of. Zeros without a ring."""

    student_stall_s: float = 0.0
    teacher_stall_s: float = 0.0
    bytes_received: int = 0
    retries: int = 0
    occupancy: int = 0

    @classmethod
    def of(cls, ring: Ring | None) -> RingTotals:
        if ring is None:
            return cls()
        now = ring.stats()
        machine = now.machine
        occupancy = machine.num_filled + machine.num_leased
        return cls(now.student_stall_s, machine.teacher_stall_s, machine.bytes_received, machine.retries, occupancy)


class Loop:
    """Trains from `progress` to the end of the plan."""

    def __init__(
        self,
        *,
        module: DistilledStudent,
        optimizer: StudentOptimizer,
        schedule: Schedule,
        plan: MicroBatchPlan,
        feed: Feed,
        ring: Ring | None,
        eval_data: TokenDataset | None,
        settings: LoopSettings,
        progress: Progress,
        save: Callable[[Progress], None],
        step_file: MetricsFile,
        eval_file: MetricsFile,
        eval_losses: dict[int, float],
    ) -> None:
        """save: writes a checkpoint of the present state. eval_losses: held-out losses so far, by step."""
        self._module = module
        self._optimizer = optimizer
        self._schedule = schedule
        self._plan = plan
        self._feed = feed
        self._ring = ring
        self._eval_data = eval_data
        self._settings = settings
        self._save = save
        self._step_file = step_file
        self._eval_file = eval_file
        self._saved_step = progress.step
        self._stop_signal = 0
        self._updating = False
        self.progress = progress
        self.eval_losses = eval_losses

    def run(self) -> None:
        """Raises TeacherLost, Interrupted, Diverged or what else ends a step: a checkpoint of the last step taken is
        there."""
        num_steps = self._plan.num_steps
        with self._signals(), Reporter(num_steps=num_steps, first_step=self.progress.step) as reporter:
            if self._evaluates_after(self.progress.step):
                # Before the first step; or a stop in the midst of this evaluation ended the run before.
                self._evaluate(reporter)
            started_s = time.monotonic()
            for planned in self._plan.steps(self.progress.position):
                before, generators = RingTotals.of(self._ring), capture_rng()
                try:
                    metrics = self._step(planned, before, started_s)
                except Stopped:
                    self._checkpoint_before_step(generators)
                    raise Interrupted(self._stop_signal, self.progress.step) from None
                except DisaggKDError as error:
                    self._checkpoint_at_the_end(generators, error)
                    raise
                except Exception:
                    # Out of memory, mostly. Whatever it is, it is not to cost the steps before it.
                    self._try_to_checkpoint(generators)
                    raise
                self._step_file.write(metrics)
                reporter.step(metrics)
                self._between_steps(reporter)
                started_s = time.monotonic()
            self._evaluate(reporter)
            self._checkpoint()

    def _step(self, planned: PlannedStep, before: RingTotals, started_s: float) -> StepMetrics:
        """One optimizer step. An exception leaves weights and optimizer as the last step made them, unless it comes
        while `_updating` is set."""
        device = self._settings.device
        parts = torch.zeros(3, dtype=torch.float64, device=device)
        forward_before_s = self._feed.counts.forward_s
        self._optimizer.zero_grad()
        seqs = [batch.seq for batch in planned.microbatches if batch.seq is not None]
        tokens = 0
        for _ in planned.microbatches:
            batch = self._feed.next()
            tokens += batch.num_tokens
            with self._feed.states(batch, stopping=lambda: bool(self._stop_signal)) as states:
                out = self._forward(batch, states, num_rows=planned.num_rows)
                torch.autograd.backward(out.loss)
            parts += torch.stack([out.loss.detach(), out.kd, out.ce]).double()
        norm = float(clip_gradients(self._module.parameters(), max_norm=self._settings.clip_norm))
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise Diverged(
                f"step {planned.step}: the gradient norm is {norm}; the step was not taken: lower --lr, or look at the "
                f"data of samples {planned.sample_ids[:8].tolist()}"
            )
        lr = self._schedule.lr_at(planned.step)
        self._updating = True
        self._optimizer.step(lr=lr)
        progress = self.progress
        progress.step, progress.position = planned.step, planned.next_position
        progress.samples += len(planned.sample_ids)
        progress.rows += planned.num_rows
        self._updating = False
        loss, kd, ce = parts.tolist()
        step_s = time.monotonic() - started_s
        after = RingTotals.of(self._ring)
        return StepMetrics(
            step=planned.step,
            epoch=planned.epoch,
            position=planned.next_position,
            seq_first=min(seqs, default=-1),
            seq_last=max(seqs, default=-1),
            lm_loss=ce,
            kd=kd,
            loss=loss,
            rows=planned.num_rows,
            samples=len(planned.sample_ids),
            lr=lr,
            grad_norm=norm,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            teacher_s=self._feed.counts.forward_s - forward_before_s,
            student_stall_s=after.student_stall_s - before.student_stall_s,
            teacher_stall_s=after.teacher_stall_s - before.teacher_stall_s,
            ring_occupancy=before.occupancy,
            bytes_received=after.bytes_received,
            retries=after.retries,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def _forward(self, batch: MicroBatch, states: torch.Tensor | None, *, num_rows: int) -> KDOutput:
        try:
            out: KDOutput = self._module(
                **batch.inputs(self._settings.device), teacher_hidden=self._on_device(states), num_rows=num_rows
            )
        except (ValueError, OverflowError) as error:
            # The loss refuses settings and models like this: it knows nothing of commands and their errors.
            raise ConfigError(f"step {self.progress.step + 1}: {error}") from error
        return out

    def _on_device(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """The states where the loss runs; on the CPU they are read in place. A microbatch without rows has none."""
        if states is not None:
            return states.to(self._settings.device, non_blocking=True)
        if self._ring is None:
            return None
        weight = self._module.teacher_weight
        assert weight is not None  # a ring comes with a teacher's head
        return weight.new_empty(0, weight.shape[1])

    def _between_steps(self, reporter: Reporter) -> None:
        step, settings = self.progress.step, self._settings
        if self._evaluates_after(step):
            self._evaluate(reporter)
        if settings.checkpoint_every and step % settings.checkpoint_every == 0:
            self._checkpoint()
        if self._stop_signal:
            self._checkpoint()
            raise Interrupted(self._stop_signal, step)

    def _evaluates_after(self, step: int) -> bool:
        every = self._settings.eval_every
        return step == 0 or (every > 0 and step % every == 0)

    def _evaluate(self, reporter: Reporter) -> None:
        """Raises Interrupted: a signal came; the checkpoint is there, and a resume evaluates first."""
        step, settings = self.progress.step, self._settings
        if self._eval_data is None or step in self.eval_losses:
            return
        batches = sequential_microbatches(
            self._eval_data,
            batch_size=settings.batch_size,
            pad_id=settings.pad_id,
            max_samples=settings.eval_samples,
        )
        try:
            result = evaluate(self._module, self._until_stopped(batches), device=settings.device)
        except Stopped:
            self._checkpoint()
            raise Interrupted(self._stop_signal, step) from None
        self.eval_losses[step] = result.nats_per_row
        self._eval_file.write({"step": step, "eval_loss": result.nats_per_row, "rows": result.num_rows})
        reporter.say(f"step {step}: held-out loss {result.nats_per_row:.4f} nats/token over {result.num_rows} tokens")

    def _until_stopped(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            if self._stop_signal:
                raise Stopped("the run is to stop in the midst of an evaluation")
            yield batch

    def _checkpoint(self) -> None:
        if self._saved_step != self.progress.step:
            self._save(self.progress)
            self._saved_step = self.progress.step

    def _checkpoint_before_step(self, generators: RngState) -> None:
        """As after the last step taken: what the step that was not taken drew (dropout) is drawn again on resume."""
        restore_rng(generators)
        self._checkpoint()

    def _checkpoint_at_the_end(self, generators: RngState, error: DisaggKDError) -> None:
        """For an error that ends the run in order. A disk that is full too must not hide it, nor its exit code."""
        try:
            self._checkpoint_before_step(generators)
        except CheckpointError as failure:
            logger.error(
                "no checkpoint of step %d: %s; the run ends because of this: %s", self.progress.step, failure, error
            )

    def _try_to_checkpoint(self, generators: RngState) -> None:
        """For an error that may keep even that from working: it stays the one that is raised."""
        if self._updating:
            logger.warning("the error came in the middle of an update: no checkpoint of it is written")
            return
        try:
            self._optimizer.zero_grad()
            self._checkpoint_before_step(generators)
        except Exception as error:  # noqa: BLE001 - said in the log; the caller raises what came first
            logger.warning("no checkpoint of step %d could be written: %s", self.progress.step, error)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP end the run after the step under way, or at once where that waits for a teacher;
        the second one ends it without a checkpoint."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._stop_signal:
                raise KeyboardInterrupt
            self._stop_signal = number

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
