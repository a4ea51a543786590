"""The start-up self-test: what we would serve, against the model's own logits.

Wrong states train a student without any error: a final norm left out, a softcap or a scale that the table does not
know, a model that looks at the padding. So the service compares once, before it listens, and refuses on a difference.
Shapes: B rows, S tokens, N = B * S, H hidden, V head columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from planner.head_spec import HeadSpec
from ring.core.errors import ConfigError
from teacher.body import SplitModel

_ROWS, _TOKENS, _PADDED_TOKENS = 2, 16, 64
# Logits of at least this size show a cap of any usual height (15, 30, 50); random weights give far smaller ones.
_LOUD_LOGIT = 64.0
# Largest difference, relative to the largest logit: a few roundings of the dtype (a cap in bf16 costs three).
_LOGIT_TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3, "fp32": 1e-4, "fp64": 1e-9}
# Root-mean-square change of real tokens' states when the padding changes. In 16 bits the padding changes which kernel
# sums what, and a last bit may send a token to another expert; a model that reads its padding changes everything.
_PADDING_TOLERANCE = {"bf16": 0.1, "fp16": 0.1, "fp32": 1e-3, "fp64": 1e-6}

StatesOf = Callable[[Tensor], Tensor]


def apply_head(states_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, spec: HeadSpec) -> Tensor:
    """Logits [N, V] under `spec`: the product in the head's dtype, the rest in fp32 (fp64 for an fp64 head)."""
    logits_NV = torch.nn.functional.linear(states_NH, weight_VH, bias_V)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) * spec.logit_scale
    if spec.logit_softcap is not None:
        logits_NV = spec.logit_softcap * torch.tanh(logits_NV / spec.logit_softcap)
    return logits_NV


def probe_ids(num_rows: int, num_tokens: int, num_ids: int, *, offset: int = 0) -> Tensor:
    """Token ids [num_rows, num_tokens], spread over the vocabulary and the same on every machine."""
    steps = torch.arange(offset, offset + num_rows * num_tokens, dtype=torch.int64)
    return ((steps * 7919 + 13) % num_ids).view(num_rows, num_tokens)


def check_model(split: SplitModel, spec: HeadSpec, *, states_of: StatesOf | None = None) -> None:
    """Pass both checks below, or raise ConfigError that names the class and the largest difference.

    `states_of`: gives final states [B, S, H] for token ids [B, S]; default: the split model's own."""
    states_of = split.states if states_of is None else states_of
    try:
        with torch.inference_mode():
            _check_head(split, spec, states_of)
            _check_padding(split, spec, states_of)
    except ConfigError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{split.class_name}: the start-up probe failed: {reason}; "
            f"allowed: a causal LM that runs on token ids alone"
        ) from error


def _check_head(split: SplitModel, spec: HeadSpec, states_of: StatesOf) -> None:
    """head(states) equals the model's logits, as they are and turned up until any softcap would show."""
    ids_BS = probe_ids(_ROWS, _TOKENS, split.num_embeddings).to(split.weight_VH.device)
    states_BSH = states_of(ids_BS)
    if states_BSH.shape != (_ROWS, _TOKENS, spec.hidden_size):
        raise ConfigError(
            f"{split.class_name}: states of shape {tuple(states_BSH.shape)} for {_ROWS} x {_TOKENS} tokens; "
            f"allowed: [rows, tokens, {spec.hidden_size}], what its head takes"
        )
    states_NH = states_BSH.flatten(0, 1)
    plain = torch.nn.functional.linear(states_NH, split.weight_VH, split.bias_V).abs().amax().item()
    # A power of two changes the exponents only: no rounding of its own.
    gain = 1.0 if plain == 0 else 2.0 ** max(0, torch.tensor(_LOUD_LOGIT / plain).log2().ceil().int().item())
    for factor in (1.0, gain):
        own_NV = _own_logits(split, ids_BS, factor).flatten(0, 1)
        ours_NV = apply_head(states_NH * factor, split.weight_VH, split.bias_V, spec)
        _compare(split.class_name, spec, own_NV, ours_NV)


def _own_logits(split: SplitModel, ids_BS: Tensor, factor: float) -> Tensor:
    """The model's own logits with its head's input multiplied by `factor`."""
    num_calls = 0

    def turn_up(_module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal num_calls
        num_calls += 1
        return (arguments[0] * factor, *arguments[1:])

    handle = split.head.register_forward_pre_hook(turn_up)
    try:
        logits: Tensor = split.model(input_ids=ids_BS, use_cache=False).logits
    finally:
        handle.remove()
    if num_calls != 1:
        raise ConfigError(
            f"{split.class_name}: its logits call get_output_embeddings() {num_calls} times; "
            f"allowed: once, as the last step before softcap and scale"
        )
    return logits


def _compare(class_name: str, spec: HeadSpec, own_NV: Tensor, ours_NV: Tensor) -> None:
    # Some families cut the padded columns off their logits.
    num_columns = min(own_NV.shape[-1], spec.vocab_size)
    if num_columns < spec.real_vocab:
        raise ConfigError(f"{class_name}: {num_columns} logits a token, but {spec.real_vocab} tokens are real")
    own_NV, ours_NV = own_NV[:, :num_columns].to(ours_NV.dtype), ours_NV[:, :num_columns]
    difference, largest = (own_NV - ours_NV).abs().amax().item(), own_NV.abs().amax().item()
    allowed = _LOGIT_TOLERANCE[spec.dtype] * largest
    if not difference <= allowed:
        raise ConfigError(
            f"{class_name}: head(states) differs from the model's own logits by up to {difference:.3g} (largest logit "
            f"{largest:.3g}, allowed {allowed:.3g}); its logits need more than final-normed states, head, "
            f"scale {spec.logit_scale:g} and softcap {spec.logit_softcap}, so it can't be served"
        )


def _check_padding(split: SplitModel, spec: HeadSpec, states_of: StatesOf) -> None:
    """Tokens on the right change nothing to their left: rows of different lengths may share a batch."""
    real = probe_ids(_ROWS, _TOKENS, split.num_embeddings)
    outcomes = []
    for offset in (1000, 5000):
        padding = probe_ids(_ROWS, _PADDED_TOKENS - _TOKENS, split.num_embeddings, offset=offset)
        ids_BS = torch.cat([real, padding], dim=1).to(split.weight_VH.device)
        states_BSH = states_of(ids_BS)[:, :_TOKENS]
        outcomes.append(states_BSH.to(torch.promote_types(states_BSH.dtype, torch.float32)))
    change = ((outcomes[0] - outcomes[1]).square().mean() / outcomes[0].square().mean()).sqrt().item()
    if not change <= _PADDING_TOLERANCE[spec.dtype]:
        raise ConfigError(
            f"{split.class_name}: tokens to the right change the states of a token by {change:.2g} (relative, allowed "
            f"{_PADDING_TOLERANCE[spec.dtype]:.2g}): not a causal LM, so it can't be served"
        )
