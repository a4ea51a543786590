"""What torch calls the dtypes of the wire."""

from __future__ import annotations

import torch

from ring.core.messages import WireDtype

TORCH_DTYPES: dict[WireDtype, torch.dtype] = {
    WireDtype.BF16: torch.bfloat16,
    WireDtype.FP16: torch.float16,
    WireDtype.FP32: torch.float32,
    WireDtype.FP64: torch.float64,
}
