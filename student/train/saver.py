"""What a run leaves on the disk: its checkpoints, whole or in shards, and the trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ring.core.errors import ConfigError
from student.checkpoint import CheckpointError, TrainState, checkpoint_path, export_model, write_checkpoint
from student.config import TrainConfig
from student.rng import RngState, capture_rng
from student.train.claim import Claim
from student.train.parts import Parts, Trained
from student.train.records import Records
from student.train.resume import Progress, RunFiles

if TYPE_CHECKING:
    from student.parallel.checkpoint import BackgroundWriter


@dataclass(frozen=True, kw_only=True)
class Saver:
    """claim, records: None on ranks that have none. fixed: the `curve_hash` of the run. background: writes checkpoints
    while training goes on; None: training waits."""

    config: TrainConfig
    files: RunFiles
    claim: Claim | None
    parts: Parts
    trained: Trained
    records: Records | None
    fixed: str
    background: BackgroundWriter | None

    def save(self, now: Progress) -> None:
        """A checkpoint of the present state; all ranks together. In the background it is durable after `finish` only.

        Raises CheckpointError, RankFailed, RankLost. One before that failed in the background is only said."""
        parts, ranks = self.parts, self.parts.ranks
        ranks.together(self._check_claim)
        # First: no checkpoint may survive a power cut without the metrics that lead to it.
        ranks.together(self._sync_records)
        generators = ranks.gather_words(capture_rng().to_json())
        state = TrainState(
            step=now.step,
            position=now.position,
            config_hash=self.fixed,
            rng=tuple(RngState.from_json(entry) for entry in generators),
            samples_left_out=now.samples_left_out,
            steps_left_out_in_a_row=now.steps_left_out_in_a_row,
        )
        if ranks.has_groups:
            from student.parallel.checkpoint import CheckpointParts, write_sharded_checkpoint

            root, keep = self.files.checkpoints, self.config.keep_checkpoints
            made_of = CheckpointParts.of(
                parts.student.model,
                self.trained.shares,
                optimizer_tensors=self.trained.optimizer.state_tensors(),
                tokenizer=parts.student.tokenizer,
            )
            if self.background is not None:
                self.background.write(root, state, parts=made_of, keep=keep)
            else:
                write_sharded_checkpoint(root, state, ranks=ranks, parts=made_of, keep=keep)
            return
        write_checkpoint(
            self.files.checkpoints,
            state,
            model=parts.student.model,
            optimizer_tensors=self.trained.optimizer.state_tensors(),
            tokenizer=parts.student.tokenizer,
            keep=self.config.keep_checkpoints,
        )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Raises as `save`."""
        if self.background is not None:
            self.background.finish()

    def export(self, *, step: int) -> None:
        """The trained model, as it is after its last step, as one Hugging Face directory: by rank 0, from the
        checkpoint of that step where ranks share it.

        Raises CheckpointError, RankFailed, RankLost: that checkpoint is not whole, or the model can't be written."""
        ranks, student = self.parts.ranks, self.parts.student
        ranks.together(self._check_claim)
        if not ranks.has_groups:
            export_model(self.files.model, model=student.model, tokenizer=student.tokenizer)
            return
        from student.export import export_checkpoint

        def lead() -> None:
            try:
                # Not the newest whole one: that may be of an older step.
                export_checkpoint(checkpoint_path(self.files.checkpoints, step), self.files.model)
            except ConfigError as error:
                raise CheckpointError(f"the model after step {step} could not be exported: {error}") from error

        ranks.together(lead if ranks.is_first else lambda: None)

    def _check_claim(self) -> None:
        if self.claim is not None:
            self.claim.check()

    def _sync_records(self) -> None:
        if self.records is not None:
            self.records.sync()
