"""What a run writes down as it goes: a line a step, a line an evaluation. Only one rank of a run has them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from student.metrics import MetricsFile
from student.train.resume import RunFiles, warn_of_gaps


@dataclass(frozen=True)
class Records:
    """metrics.jsonl and eval.jsonl."""

    steps: MetricsFile
    evaluations: MetricsFile

    @classmethod
    def open(cls, stack: ExitStack, files: RunFiles, *, step: int) -> Records:
        """Cut to what the checkpoint of `step` contains (0: new), and closed with the stack."""
        steps = MetricsFile(files.metrics, resume_step=step)
        stack.callback(steps.close)
        warn_of_gaps(steps, step=step)
        evaluations = MetricsFile(files.evaluations, resume_step=step)
        stack.callback(evaluations.close)
        return cls(steps, evaluations)

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        self.steps.sync()
        self.evaluations.sync()
