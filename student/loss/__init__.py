"""The fused distillation loss. `from student.loss import KDLoss, Head` is all that a trainer needs."""

from student.loss.head import Head
from student.loss.kd import KDLoss
from student.loss.of_model import head_of
from student.loss.options import KDOutput, LossOptions
from student.loss.reference import FullLogitsLoss, full_logits_loss, reference_loss

__all__ = [
    "FullLogitsLoss",
    "Head",
    "KDLoss",
    "KDOutput",
    "LossOptions",
    "full_logits_loss",
    "head_of",
    "reference_loss",
]
