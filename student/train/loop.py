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
from student.metrics import Reporter, StepMetrics, peak_rss_bytes
from student.model import evaluate
from student.optim import Schedule
from student.parallel.ranks import RankFailed, RankLost, Ranks
from student.rng import RngState, capture_rng, restore_rng
from student.train.feed import Feed, Stopped
from student.train.parts import Trained
from student.train.records import Records
from student.train.resume import Progress
from student.train.totals import RingTotals, StepTotals, over_ranks, step_metrics

logger = logging.getLogger(__name__)


class Interrupted(DisaggKDError):
    """A signal asked for the end; the step under way was finished and a checkpoint written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; --resume goes on from there")
        self.exit_code = 128 + number


class Diverged(DisaggKDError):
    """The gradient is not finite; the step was not taken."""


class StepFailed(DisaggKDError):
    """The model or the loss refused what a step brought, after others had gone well."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """clip_norm: None only measures. max_left_out: steps in a row whose gradient may not be finite. *_every: steps; 0 =
    never between start and end. eval_samples: None = all."""

    batch_size: int
    clip_norm: float | None
    max_left_out: int
    checkpoint_every: int
    eval_every: int
    eval_samples: int | None
    pad_id: int
    device: torch.device


class Loop:
    """Trains from `progress` to the end of the plan."""

    def __init__(
        self,
        *,
        trained: Trained,
        schedule: Schedule,
        plan: MicroBatchPlan,
        feed: Feed,
        ring: Ring | None,
        ranks: Ranks,
        eval_data: TokenDataset | None,
        settings: LoopSettings,
        progress: Progress,
        save: Callable[[Progress], None],
        finish_saving: Callable[[], None] = lambda: None,
        records: Records | None,
        eval_losses: dict[int, float],
    ) -> None:
        """save: writes a checkpoint of the present state, or begins to; finish_saving: it is durable when this returns.
        records: None on ranks that keep none. eval_losses: held-out losses so far, by step."""
        self._module = trained.module
        self._shares = trained.shares
        self._optimizer = trained.optimizer
        self._schedule = schedule
        self._plan = plan
        self._feed = feed
        self._ring = ring
        self._ranks = ranks
        self._eval_data = eval_data
        self._settings = settings
        self._save = save
        self._finish_saving = finish_saving
        self._records = records
        self._first_step = self._saved_step = progress.step
        self._stop_signal = 0
        self._updating = False
        self.progress = progress
        self.eval_losses = eval_losses

    def run(self) -> None:
        """Raises TeacherLost, Interrupted, Diverged or what else ends a step: a checkpoint of the last step taken is
        there, of several ranks where all know of it (`Ranks.is_known_to_all`)."""
        num_steps = self._plan.num_steps
        first, is_first = self.progress.step, self._ranks.is_first
        with self._signals(), Reporter(num_steps=num_steps, first_step=first, silent=not is_first) as reporter:
            if self._evaluates_after(self.progress.step):
                # Before the first step; or a stop in the midst of this evaluation ended the run before.
                self._evaluate(reporter)
            started_s = time.monotonic()
            for planned in self._plan.steps(self.progress.position):
                before, generators = RingTotals.of(self._ring), capture_rng()
                try:
                    metrics = self._step(planned, before, started_s)
                except Stopped as stopped:
                    self._checkpoint_last_step(generators)
                    raise self._interrupted(stopped.signal) from None
                except DisaggKDError as error:
                    if not self._ranks.are_many or self._ranks.is_known_to_all(error):
                        self._checkpoint_at_the_end(generators, error)
                    raise
                except Exception as error:
                    # Out of memory, mostly. Whatever it is, it is not to cost the steps before it.
                    if self._ranks.are_many:
                        raise self._ranks.failure_of(error) from error
                    self._try_to_checkpoint(generators if self.progress.step < planned.step else capture_rng())
                    raise
                if self._records is not None:
                    self._records.steps.write(metrics)
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
        self._shares.zero_grad()
        tokens = 0
        for _ in planned.microbatches:
            batch = self._feed.next()
            tokens += batch.num_tokens
            with self._feed.states(batch, stop_signal=lambda: self._stop_signal) as states:
                out = self._forward(batch, states, num_rows=planned.num_rows)
                torch.autograd.backward(out.loss)
            parts += torch.stack([out.loss.detach(), out.kd, out.ce]).double()
        self._shares.collect_gradients()
        norm = self._shares.clip(max_norm=self._settings.clip_norm)
        lr = self._schedule.lr_at(planned.step)
        # With a vocabulary group each of its ranks has the loss of all of them.
        loss, kd, ce = (parts / self._module.num_copies_of_loss).tolist()
        is_taken = math.isfinite(norm)
        if is_taken:
            self._update(planned, lr=lr)
        else:
            self._leave_out(planned, norm=norm, kd=kd, ce=ce)
        after = RingTotals.of(self._ring)
        own = StepTotals(
            loss=loss,
            kd=kd,
            lm_loss=ce,
            tokens=tokens,
            teacher_s=self._feed.counts.forward_s - forward_before_s,
            teacher_stall_s=after.teacher_stall_s - before.teacher_stall_s,
            bytes_received=after.bytes_received,
            retries=after.retries,
            student_stall_s=after.student_stall_s - before.student_stall_s,
            ring_occupancy=before.occupancy,
            peak_rss_bytes=peak_rss_bytes(),
        )
        total = over_ranks(own, self._ranks)
        step_s = time.monotonic() - started_s
        return step_metrics(planned, total, lr=lr, norm=norm, step_s=step_s, is_taken=is_taken)

    def _update(self, planned: PlannedStep, *, lr: float) -> None:
        self._updating = True
        self._optimizer.step(lr=lr)
        self._go_on(planned)
        self._updating = False
        self.progress.steps_left_out_in_a_row = 0

    def _go_on(self, planned: PlannedStep) -> None:
        self.progress.step, self.progress.position = planned.step, planned.next_position

    def _leave_out(self, planned: PlannedStep, *, norm: float, kd: float, ce: float) -> None:
        """A step whose gradient is not finite changes nothing; its samples are counted. kd, ce: this rank's share.

        Raises Diverged, on every rank: that was one too many in a row."""
        self._shares.zero_grad()
        kd, ce = (sum(shares) for shares in zip(*self._ranks.gather_floats([kd, ce]), strict=True))
        why = f"the gradient norm is {norm}, kd {kd:.4g}, lm_loss {ce:.4g}"
        if math.isfinite(ce) and ce and not math.isfinite(kd):  # ce is of the same rows of the student
            why += ": the teacher's states or logits are not finite"
        said = f"step {planned.step}: {why}; samples {planned.sample_ids[:8].tolist()}"
        num_before = self.progress.steps_left_out_in_a_row
        if num_before >= self._settings.max_left_out:
            raise self._ranks.known_to_all(
                Diverged(
                    f"{said}; the step was not taken; allowed: --resume with --max-left-out "
                    f"{num_before + 1} leaves it out, a new run from the last checkpoint's model may "
                    f"have another --lr, data or teacher"
                )
            )
        if self._ranks.is_first:
            logger.warning("%s; the step is left out", said)
        self.progress.steps_left_out_in_a_row += 1
        self._go_on(planned)
        self.progress.samples_left_out += len(planned.sample_ids)

    def _forward(self, batch: MicroBatch, states: torch.Tensor | None, *, num_rows: int) -> KDOutput:
        try:
            out: KDOutput = self._module(
                **batch.inputs(self._settings.device), teacher_hidden=self._on_device(states), num_rows=num_rows
            )
        except (ValueError, OverflowError) as error:
            raise self._refusal(f"step {self.progress.step + 1}", error) from error
        return out

    def _refusal(self, where: str, error: ValueError | OverflowError) -> DisaggKDError:
        """What it means that model or loss refuse like this, which know nothing of commands and their errors: a setting
        or a model that can't work, as long as no step has shown that they do."""
        if self.progress.step == self._first_step:
            return ConfigError(f"{where}: {error}")
        return StepFailed(f"{where}: {type(error).__name__}: {error}")

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
            self._checkpoint(wait=False)
        if stop_signal := self._agreed_signal():
            self._checkpoint()
            raise self._interrupted(stop_signal)

    def _interrupted(self, stop_signal: int) -> Interrupted:
        """All ranks have agreed on the signal."""
        return self._ranks.known_to_all(Interrupted(stop_signal, self.progress.step))

    def _agreed_signal(self) -> int:
        """The signal that any rank got; 0: none. Raises RankLost."""
        return max(row[0] for row in self._ranks.gather([self._stop_signal]))

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
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
        try:
            result = evaluate(
                self._module, self._until_stopped(batches), device=settings.device, sum_over_ranks=self._sum_over_ranks
            )
        except Stopped as stopped:
            self._checkpoint()
            raise self._interrupted(stopped.signal) from None
        except DisaggKDError:
            raise
        except (ValueError, OverflowError) as error:
            if not self._ranks.are_many:
                self._try_to_checkpoint(capture_rng())
            raise self._refusal(f"evaluation after step {step}", error) from error
        except Exception as error:
            if self._ranks.are_many:
                raise self._ranks.failure_of(error) from error
            self._try_to_checkpoint(capture_rng())
            raise
        self.eval_losses[step] = result.nats_per_row
        if self._records is not None:
            record = {"step": step, "eval_loss": result.nats_per_row, "rows": result.num_rows}
            self._records.evaluations.write(record)
        reporter.say(f"step {step}: held-out loss {result.nats_per_row:.4f} nats/token over {result.num_rows} tokens")

    def _until_stopped(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            if stop_signal := self._agreed_signal():
                raise Stopped("the run is to stop in the midst of an evaluation", signal=stop_signal)
            yield batch

    def _sum_over_ranks(self, nats: float, num_rows: int) -> tuple[float, int]:
        rows = self._ranks.gather_floats([nats / self._module.num_copies_of_loss, num_rows])
        return sum(row[0] for row in rows), int(sum(row[1] for row in rows))

    def _checkpoint(self, *, wait: bool = True) -> None:
        """wait: it is durable when this returns; one of this step that failed in the background is made once more."""
        step = self.progress.step
        if self._saved_step != step:
            self._save(self.progress)
            self._saved_step = step
        if not wait:
            return
        try:
            self._finish_saving()
        except (CheckpointError, RankFailed) as error:
            # Else no rank may wait for the others any more.
            if self._ranks.are_many and not self._ranks.is_known_to_all(error):
                raise
            if self._ranks.is_first:
                logger.warning("no checkpoint of step %d: %s; it is tried once more", step, error)
            self._save(self.progress)
            self._finish_saving()

    def _checkpoint_last_step(self, generators: RngState) -> None:
        """As after the last step taken: what the step that was not taken drew (dropout) is drawn again on resume."""
        restore_rng(generators)
        self._checkpoint()

    def _checkpoint_at_the_end(self, generators: RngState, error: DisaggKDError) -> None:
        """For an error that ends the run in order. A disk that is full too must not hide it, nor its exit code."""
        try:
            self._checkpoint_last_step(generators)
        except (CheckpointError, RankFailed, RankLost) as failure:
            logger.error(
                "no checkpoint of step %d: %s; the run ends because of this: %s", self.progress.step, failure, error
            )

    def _try_to_checkpoint(self, generators: RngState) -> None:
        """For an error that may keep even that from working: it stays the one that is raised."""
        if self._updating:
            logger.warning("the error came in the middle of an update: no checkpoint of it is written")
            return
        try:
            self._shares.zero_grad()
            self._checkpoint_last_step(generators)
        except Exception as error:  # noqa: BLE001 - said in the log; the caller raises what came first
            logger.warning("no checkpoint of step %d could be written: %s", self.progress.step, error)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP end the run after the step under way, or at once where that waits for a teacher;
        the second one ends it without a checkpoint."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._stop_signal:
                raise KeyboardInterrupt(number)
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
