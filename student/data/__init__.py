"""The student's data: files to samples, samples to an order, the order to microbatches."""

from __future__ import annotations

from student.data.dataset import DataReport, Sample, TokenDataset
from student.data.load import DataSettings, load_data
from student.data.microbatch import IGNORE_INDEX, MicroBatch, build_microbatch, sequential_microbatches
from student.data.order import MicroBatchPlan, PlannedMicroBatch, PlannedStep

__all__ = [
    "IGNORE_INDEX",
    "DataReport",
    "DataSettings",
    "MicroBatch",
    "MicroBatchPlan",
    "PlannedMicroBatch",
    "PlannedStep",
    "Sample",
    "TokenDataset",
    "build_microbatch",
    "load_data",
    "sequential_microbatches",
]
