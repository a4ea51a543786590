"""What the examples' trainers give to the loss."""

from __future__ import annotations

import torch

from student.loss import KDLoss, KDOutput
from student.loss.call import LossCall


class NotingLoss(KDLoss):
    """Keeps the dtypes of the states that it was called with."""

    dtypes: tuple[torch.dtype, torch.dtype]

    def _compute(self, call: LossCall) -> KDOutput:
        assert call.teacher_hidden is not None
        self.dtypes = (call.student_hidden.dtype, call.teacher_hidden.dtype)
        return super()._compute(call)
