"""What stands between a model's final states and its logits, read from plain config attributes.

    logits = softcap(logit_scale * (W h + b)),   softcap(z) = cap * tanh(z / cap), or z where the cap is None

Families disagree on the names and on the direction: `logits_scaling` divides in one and multiplies in another. The
table below says it by class name; whoever loads a model still compares with the model's own logits (a probe), because a
family that is not in the table may need more than this. Pure Python: teacher, student and planner share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HEAD_DTYPES = ("bf16", "fp16", "fp32", "fp64")


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The head as a function: its sizes, and what is applied to `W h + b`.

    `vocab_size`: columns of the head weight. `real_vocab`: the first that many are tokens; the rest is padding and
    carries no mass. `logit_scale` multiplies, whatever the family's own convention is."""

    hidden_size: int
    vocab_size: int
    real_vocab: int
    has_bias: bool
    logit_softcap: float | None
    logit_scale: float
    dtype: str

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size must be >= 1, got {self.hidden_size}")
        if not 1 <= self.real_vocab <= self.vocab_size:
            raise ValueError(f"real_vocab must be in 1..vocab_size={self.vocab_size}, got {self.real_vocab}")
        if self.logit_softcap is not None and not (math.isfinite(self.logit_softcap) and self.logit_softcap > 0):
            raise ValueError(f"logit_softcap must be None or finite and > 0, got {self.logit_softcap}")
        if not math.isfinite(self.logit_scale) or self.logit_scale == 0:
            raise ValueError(f"logit_scale must be finite and not 0, got {self.logit_scale}")
        if self.dtype not in HEAD_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(HEAD_DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Which config attributes a family reads. `scale_divides`: the attribute divides the logits (or the states)."""

    softcap: str | None = "final_logit_softcapping"
    scale: str | None = None
    scale_divides: bool = False


# By the beginning of the class name; the longest match wins. The attribute alone decides nothing: MPT has a
# `logit_scale` that its logits never see, and the vision wrapper of Gemma3 ignores the cap of its text config.
_RULES: dict[str, _Rule] = {
    "": _Rule(),
    "Cohere": _Rule(scale="logit_scale"),
    "FalconH1": _Rule(scale="lm_head_multiplier"),
    "Gemma3ForConditionalGeneration": _Rule(softcap=None),
    "Granite": _Rule(scale="logits_scaling", scale_divides=True),
    "HyperCLOVAX": _Rule(scale="logits_scaling"),
    "Inkling": _Rule(scale="logits_mup_width_multiplier", scale_divides=True),
    "Inkling2": _Rule(),
    "MiniCPM3": _Rule(scale="logits_scaling", scale_divides=True),
    "RecurrentGemma": _Rule(softcap="logits_soft_cap"),
    "xLSTM": _Rule(softcap="output_logit_soft_cap"),
}


def head_spec_of(
    config: object,
    class_name: str,
    *,
    hidden_size: int,
    vocab_size: int,
    has_bias: bool,
    dtype: str,
    num_tokens: int | None = None,
) -> HeadSpec:
    """The head of a model of class `class_name` with this config (its text part is found here).

    `hidden_size`, `vocab_size`: the shape [vocab_size, hidden_size] of the head weight, which is not always what the
    config says. `num_tokens`: highest token id of the tokenizer + 1; None: every column is a token. A tokenizer may
    define more tokens than the head has columns (tokens that are read but never written); real_vocab ends at the head.

    Raises ValueError: the config holds a cap or scale that is no usable number."""
    text = _text_config(config)
    rule = _RULES[max((prefix for prefix in _RULES if class_name.startswith(prefix)), key=len)]
    unpadded = _number(text, "unpadded_vocab_size")
    limits = [limit for limit in (vocab_size, num_tokens, unpadded) if limit is not None]
    scale = _number(text, rule.scale)
    if scale is None:
        scale = 1.0
    elif scale == 0:
        raise ValueError(f"{class_name}: config.{rule.scale} must not be 0")
    elif rule.scale_divides:
        scale = 1.0 / scale
    return HeadSpec(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        real_vocab=int(min(limits)),
        has_bias=has_bias,
        logit_softcap=_number(text, rule.softcap),
        logit_scale=scale,
        dtype=dtype,
    )


def max_positions_of(config: object) -> int | None:
    """The longest document that the model has positions for; None where the config sets no bound."""
    text = _text_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        bound = _number(text, name)
        if bound is not None:
            return int(bound)
    return None


def _text_config(config: object) -> object:
    get_text_config = getattr(config, "get_text_config", None)
    return config if get_text_config is None else get_text_config()


def _number(config: object, name: str | None) -> float | None:
    value = None if name is None else getattr(config, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.{name} must be a number or None, got {value!r}")
    return float(value)
