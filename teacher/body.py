"""A causal language model in its two halves: the body that gives final states, and the head that turns them to logits.

The service runs only the body: logits are never computed after the start-up probe.
Shapes: B rows of a batch, S padded tokens, H hidden, V head columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.head_spec import HeadSpec, head_spec_of
from ring.core.errors import ConfigError
from ring.core.messages import WireDtype
from ring.dtypes import TORCH_DTYPES


def wire_dtype_of(dtype: torch.dtype) -> WireDtype:
    """Raises ConfigError: no wire dtype holds it (an integer or 8-bit head)."""
    for wire_dtype, torch_dtype in TORCH_DTYPES.items():
        if torch_dtype is dtype:
            return wire_dtype
    allowed = ", ".join(wire_dtype.value for wire_dtype in TORCH_DTYPES)
    raise ConfigError(f"teacher: a head of dtype {dtype} can't be served; allowed: {allowed} (ask with --dtype)")


class SplitModel:
    """Body and head of a Hugging Face causal LM; shares the model's tensors.

    Raises ConfigError: the model does not come apart this way."""

    def __init__(self, model: Any) -> None:
        self.class_name = type(model).__name__
        self.config = model.config
        body = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else None
        if not isinstance(body, nn.Module):
            raise ConfigError(
                f"{self.class_name}: no body under base_model_prefix {model.base_model_prefix!r}; "
                f"allowed: a causal LM made of a body and a head"
            )
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ConfigError(
                f"{self.class_name}: get_output_embeddings() gave {type(head).__name__}; "
                f"allowed: one module with a weight [vocabulary, hidden]"
            )
        bias = getattr(head, "bias", None)
        self.model: Any = model
        self.body: nn.Module = body
        self.head: nn.Module = head
        self.weight_VH: Tensor = weight.detach()
        self.bias_V: Tensor | None = bias.detach() if isinstance(bias, Tensor) else None

    @property
    def num_embeddings(self) -> int:
        """Token ids below this have an input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def freeze(self) -> None:
        """Inference only, and only states: no dropout, no gradient, no cache, no router logits or attention maps."""
        self.model.eval()
        self.model.requires_grad_(False)
        configs: list[Any] = [self.config, self.config.get_text_config(), self.body.config]
        for config in configs:
            for name in ("output_router_logits", "output_hidden_states", "output_attentions", "use_cache"):
                if getattr(config, name, False):
                    setattr(config, name, False)
            config.return_dict = True

    def states(self, token_ids_BS: Tensor) -> Tensor:
        """Final-normed states [B, S, H] in the head's dtype: what the head sees. Call under `torch.inference_mode()`.

        No attention mask: rows are padded on the right only, and a causal model never looks there."""
        output = self.body(input_ids=token_ids_BS, use_cache=False)
        states_BSH: Tensor = output.last_hidden_state
        return states_BSH.to(self.weight_VH.dtype)

    def spec(self, num_tokens: int) -> HeadSpec:
        """Raises ConfigError: a cap or scale in the config is unusable."""
        vocab_size, hidden_size = self.weight_VH.shape
        try:
            return head_spec_of(
                self.config,
                self.class_name,
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                has_bias=self.bias_V is not None,
                dtype=wire_dtype_of(self.weight_VH.dtype).value,
                num_tokens=num_tokens,
            )
        except ValueError as error:
            raise ConfigError(f"{self.class_name}: {error}") from error
