"""Which model is this? One hash that every replica of a run must share, and the hash of the head's bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from teacher.body import SplitModel

#: Raise it when the same weights and tokens give other states than before (another norm, another cast). Versions of
#: torch and transformers are left out on purpose: they differ between the nodes of a real cluster, and what they change
#: in the states is rounding. A release of transformers that adds config keys does change the fingerprint.
ENGINE_VERSION = "1"

_SAMPLES_PER_TENSOR = 64
_CHUNK_BYTES = 64 << 20
#: Config keys that say how the model was stored or is run, not what it computes.
_VOLATILE_KEYS = {"transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict"}


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements in row-major order. A tensor in host memory that is contiguous is not copied."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.cpu().numpy().data


def head_sha256(weight_VH: Tensor, bias_V: Tensor | None) -> str:
    """sha256 of the weight's bytes, row-major, then the bias's: what a receiver computes over the pieces it got."""
    digest = hashlib.sha256()
    rows_a_chunk = max(1, _CHUNK_BYTES // max(1, weight_VH[:1].numel() * weight_VH.element_size()))
    # In chunks: a head on an accelerator passes through host memory piece by piece.
    for start in range(0, len(weight_VH), rows_a_chunk):
        digest.update(bytes_of(weight_VH[start : start + rows_a_chunk]))
    if bias_V is not None:
        digest.update(bytes_of(bias_V))
    return digest.hexdigest()


def fingerprint(split: SplitModel, *, head_digest: str | None = None) -> str:
    """sha256 over engine version, class, config, every tensor's name, shape, dtype and a sample of its elements, and
    the head's bytes. Where the model is stored, on which device it runs and how its config was saved play no part.

    The samples tell a fine-tuned model from its base where the head was frozen. `head_digest`: `head_sha256` of the
    whole head, where it is known already."""
    if head_digest is None:
        head_digest = head_sha256(split.weight_VH, split.bias_V)
    digest = hashlib.sha256()
    for part in (ENGINE_VERSION, split.class_name, _canonical_config(split), head_digest):
        digest.update(f"{len(part)}:{part}".encode())
    for name, tensor in _tensors(split):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _canonical_config(split: SplitModel) -> str:
    config = json.loads(split.config.to_json_string(use_diff=False))
    return json.dumps(_without_volatile(config), sort_keys=True)


def _without_volatile(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: _without_volatile(inner)
            for key, inner in value.items()
            if not (key.startswith(("_", "output_")) or key in _VOLATILE_KEYS)
        }
    if isinstance(value, list):
        return [_without_volatile(inner) for inner in value]
    return value


def _tensors(split: SplitModel) -> Iterable[tuple[str, Tensor]]:
    # Parameters name a tied tensor once; buffers that are not saved (rotary tables) follow from the config.
    saved = split.model.state_dict()
    parameters = dict(split.model.named_parameters())
    buffers = {name: tensor for name, tensor in split.model.named_buffers() if name in saved}
    return sorted((parameters | buffers).items())


def _sample(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
    return bytes_of(flat[::step][:_SAMPLES_PER_TENSOR])
