"""The head of a loaded Hugging Face causal LM, or a refusal that names what stands in the way.

The loss replaces what the model does after its final norm, so everything that touches the logits must be known: the
table of planner.head_spec says which config attribute does what in which family. What the table does not know is
refused here by name, and so is a head that is more than one matrix. Only a comparison with the model's own logits is
proof; a trainer makes it once when it loads a model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from planner.head_spec import head_spec_of
from student.loss.head import Head

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
# Attributes that speak of logits or of the head and scale or cap something; attention's and routers' own are not meant.
_TOUCHES_LOGITS = re.compile(
    r"^(?!.*(attn|attention|router|gate|mlp)).*(logit|lm_head|output_mult).*(cap|scal|mult|temp)", re.I
)
_NEUTRAL = (None, 0, 1, False, True)
# Attributes that stand in a family's config and that its logits never see.
_UNUSED = (("Mpt", "logit_scale"), ("Gemma3ForConditionalGeneration", "final_logit_softcapping"))


def head_of(model: Any, *, num_tokens: int | None = None) -> Head:
    """The head of a causal LM: weight and bias as they are (gradients reach them), cap and scale from the config.

    num_tokens: highest token id of the tokenizer + 1; columns past it are padding. None: every column is a token.

    Raises ValueError: the model has no output head, its head is not one plain matrix (an adapter, a quantised weight)
    or not in memory (an offloaded weight), or its config holds something about logits that is not known; each by its
    name.
    """
    name = type(model).__name__
    module = model.get_output_embeddings()
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        hint = ""
        if hasattr(module, "base_layer") or hasattr(module, "lora_A"):
            hint = (
                ". It carries an adapter: merge it into the weight first, or leave the head out of its target modules"
            )
        raise ValueError(f"{name}: output head {type(module).__name__}; allowed: one nn.Linear{hint}")
    if module.weight.is_meta:
        raise ValueError(
            f"{name}: the output head's weight is on meta, put aside by an offload or never loaded; allowed: a weight "
            f"in memory. Keep the head out of the offload (in a device_map, give its module a device), or load the "
            f"model without one"
        )
    config = _text_config(model.config)
    _refuse_unknown(config, name)
    spec = head_spec_of(
        model.config,
        name,
        hidden_size=module.weight.shape[1],
        vocab_size=module.weight.shape[0],
        has_bias=module.bias is not None,
        dtype=_DTYPE_NAMES.get(module.weight.dtype, str(module.weight.dtype)),
        num_tokens=num_tokens,
    )
    return Head(
        weight=module.weight,
        bias=module.bias,
        logit_softcap=spec.logit_softcap,
        logit_scale=spec.logit_scale,
        real_vocab=spec.real_vocab,
    )


def _text_config(config: Any) -> Any:
    get_text_config = getattr(config, "get_text_config", None)
    return config if get_text_config is None else get_text_config()


class _Without:
    """A config without one of its attributes."""

    def __init__(self, config: Any, hidden: str) -> None:
        self._config, self._hidden = config, hidden

    def __getattr__(self, name: str) -> Any:
        if name in (self._hidden, "get_text_config"):
            raise AttributeError(name)
        return getattr(self._config, name)


def _refuse_unknown(config: Any, class_name: str) -> None:
    """Refuse an attribute that touches logits, is not neutral, and that the table does not read for this class."""

    def spec(read: Any) -> object:
        return head_spec_of(read, class_name, hidden_size=1, vocab_size=1, has_bias=False, dtype="fp32")

    for attribute, value in sorted(vars(config).items()):
        if not _TOUCHES_LOGITS.search(attribute) or value in _NEUTRAL:
            continue
        if any(class_name.startswith(family) and attribute == unused for family, unused in _UNUSED):
            continue
        if spec(_Without(config, attribute)) == spec(_Without(config, "")):
            raise ValueError(
                f"{class_name}: config.{attribute}={value!r} may change the logits in a way not known here; allowed: "
                f"final states, one matrix, a bias, a known scale or softcap"
            )
