"""Load-time checks of a student: what the loss and the data take for granted must be true of this very model.

Each runs a few tokens through the model once. A family that needs more than final states, head, scale and softcap, or
that lets one document of a packed sequence see another, would otherwise train on wrong numbers without any error.

Legend: B sequences, S tokens of a sequence, N = B * S, H hidden size, V head columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from planner.head_spec import HeadSpec
from ring.core.errors import ConfigError

# Difference allowed, relative to the largest value: some roundings of the dtype.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-4, torch.float64: 1e-9}
# Turned up to this, logits show a softcap of any usual height; those of random weights are too small to.
_LOUD_LOGIT = 64.0
_DOCUMENT_LENGTHS = ((5, 3), (4, 4))

#: Final states [B, S, H] of token ids [B, S], and position ids [B, S] where documents are packed.
StatesOf = Callable[[Tensor, Tensor | None], Tensor]


def check_head(model: Any, spec: HeadSpec, states_of: StatesOf) -> None:
    """head(states) equals the model's own logits, as they are and with the head's input turned up.

    Raises ConfigError, naming the class: they differ, or the model can't be run on token ids alone.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    ids_BS = _token_ids(model, 2, 12)
    try:
        states_NH = states_of(ids_BS, None).flatten(0, 1)
        plain = nn.functional.linear(states_NH, head.weight, head.bias if spec.has_bias else None).abs().amax().item()
        for gain in (1.0, _LOUD_LOGIT / max(plain, 1e-6)):
            with _scaled_input(head, gain):
                own_NV = model(input_ids=ids_BS, use_cache=False).logits.flatten(0, 1)
            ours_NV = _apply_head(states_NH * gain, head, spec)
            num_columns = min(own_NV.shape[1], ours_NV.shape[1])
            difference = _relative_difference(ours_NV[:, :num_columns], own_NV[:, :num_columns])
            if not difference <= _TOLERANCE[states_NH.dtype]:
                raise ConfigError(
                    f"{name}: head(states) differs from the model's own logits by {difference:.2g} of the largest; "
                    f"allowed: {_TOLERANCE[states_NH.dtype]:.2g}. Its logits need more than final-normed states, head, "
                    f"scale {spec.logit_scale:g} and softcap {spec.logit_softcap}, so it can't be a student"
                )
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise _failed(name, "head", error) from error


def check_packing(model: Any, states_of: StatesOf) -> None:
    """Documents packed into one sequence get the states that each has alone.

    Position ids that start anew are all that tells documents apart, and whether a model's every layer heeds them
    depends on its family and on the kernels at hand.

    Raises ConfigError, naming the class: they differ, or it takes no position ids.
    """
    name = type(model).__name__
    ids_BS = _token_ids(model, len(_DOCUMENT_LENGTHS), sum(_DOCUMENT_LENGTHS[0]))
    positions_BS = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in _DOCUMENT_LENGTHS]
    ).to(ids_BS.device)
    try:
        packed_BSH = states_of(ids_BS, positions_BS)
        alone_BSH = torch.stack(
            [
                torch.cat([states_of(ids_1S, None)[0] for ids_1S in ids_S[None].split(lengths, dim=1)])
                for ids_S, lengths in zip(ids_BS, _DOCUMENT_LENGTHS, strict=True)
            ]
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise _failed(name, "packing", error) from error
    difference = _relative_difference(packed_BSH, alone_BSH)
    if not difference <= _TOLERANCE[packed_BSH.dtype]:
        raise ConfigError(
            f"--packing: {name} mixes the documents of a packed sequence (states differ by {difference:.2g} of the "
            f"largest; allowed: {_TOLERANCE[packed_BSH.dtype]:.2g}); train this model without --packing"
        )


def _token_ids(model: Any, num_sequences: int, num_tokens: int) -> Tensor:
    """Ids spread over the vocabulary, the same at every start."""
    embedding = model.get_input_embeddings().weight
    steps = torch.arange(num_sequences * num_tokens)
    ids_BS: Tensor = ((steps * 7919 + 17) % embedding.shape[0]).view(num_sequences, num_tokens)
    return ids_BS.to(embedding.device)


def _apply_head(states_NH: Tensor, head: Any, spec: HeadSpec) -> Tensor:
    logits_NV = nn.functional.linear(states_NH, head.weight, head.bias if spec.has_bias else None)
    logits_NV = logits_NV * spec.logit_scale
    if spec.logit_softcap is not None:
        logits_NV = spec.logit_softcap * torch.tanh(logits_NV / spec.logit_softcap)
    return logits_NV


@contextlib.contextmanager
def _scaled_input(module: nn.Module, gain: float) -> Iterator[None]:
    """While entered, `module` gets its first input times `gain`."""
    handle = module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * gain, *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def _relative_difference(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().amax() / right.double().abs().amax().clamp(min=1e-30))


def _failed(name: str, what: str, error: Exception) -> ConfigError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(
        f"{name}: the {what} check at start failed: {lines[0][:300]}; allowed: a causal LM that runs on token ids alone"
    )
