"""What a causal LM is made of, in numbers: parameters by component, and the widths that activations follow from.

A `ModelShape` comes from a config (planner.families) or a preset (planner.models); every closed form of memory, traffic
and pace starts from one. Counts are exact: a test compares them with the real classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.errors import PlanError

AttentionKind = Literal["full", "sliding", "latent", "delta"]
Scores = Literal["kernel", "softcap", "sinks"]
#: llama: the result is cast down before it is multiplied with the weight; gemma: all of it in float32.
NormStyle = Literal["llama", "gemma"]


@dataclass(frozen=True)
class Params:
    """A number of parameters in a number of tensors, the largest of which has so many; sums like a number."""

    count: int = 0
    tensors: int = 0
    largest: int = 0

    def __add__(self, other: Params) -> Params:
        largest = max(self.largest, other.largest)
        return Params(self.count + other.count, self.tensors + other.tensors, largest)

    def __mul__(self, times: int) -> Params:
        return Params(self.count * times, self.tensors * times, self.largest)


def matrix(rows: int, columns: int, *, bias: bool = False) -> Params:
    """A linear map from `rows` to `columns`."""
    return Params(rows * columns + (columns if bias else 0), 2 if bias else 1, rows * columns)


def vector(width: int, times: int = 1) -> Params:
    """`times` norm weights (or biases) of this width."""
    return Params(width * times, times, width)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One layer's mixing of tokens. Widths are elements a token.

    `key_width` and `value_width`: as the attention kernel reads them, key/value heads not repeated. `window_tokens`:
    how far a sliding layer looks back. `has_gate`: the output is multiplied with a sigmoid of a second half of the
    query projection. `norm_width`: elements that the query and key norms handle (0: none). `latent_width`: what the
    latent projections of MLA put between input and heads. `is_fused`: one matrix makes queries, keys and values.
    `scores`: who holds the scores: nobody (a kernel), or transformers' plain code, where a softcap or sinks keep it
    from using the kernel. For delta: `key_width` is that of the key heads, `value_width` that of the value heads,
    `state_width` the elements of the recurrent state.
    """

    kind: AttentionKind
    params: Params
    num_heads: int
    query_width: int
    key_width: int
    value_width: int
    output_width: int
    num_inputs: int = 3
    norm_width: int = 0
    latent_width: int = 0
    state_width: int = 0
    window_tokens: int | None = None
    has_gate: bool = False
    is_fused: bool = False
    scores: Scores = "kernel"


@dataclass(frozen=True, kw_only=True)
class FeedForwardShape:
    """One layer's feed-forward part: dense, or routed experts with what is shared beside them.

    `active`: parameters that one token meets. `width`: intermediate elements that one token makes, over all experts
    that it goes to. `top_k`: 0 where there is no router."""

    params: Params
    active: int
    width: int
    num_experts: int = 0
    top_k: int = 0
    has_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """`count` equal layers."""

    count: int
    attention: AttentionShape
    feed_forward: FeedForwardShape
    norms: Params

    @property
    def params(self) -> Params:
        """Of one layer."""
        return self.attention.params + self.feed_forward.params + self.norms

    @property
    def active(self) -> int:
        """Parameters of one layer that a token meets."""
        return self.params.count - self.feed_forward.params.count + self.feed_forward.active


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A causal LM. `head`: no parameters of its own where it is tied to the embedding. `has_post_norms`: its layers'
    norms stand behind attention and feed-forward, not before."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    is_tied: bool
    embedding: Params
    head: Params
    final_norm: Params
    layers: tuple[LayerShape, ...]
    norm_style: NormStyle = "llama"
    has_post_norms: bool = False

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def body(self) -> Params:
        """All layers and the final norm."""
        total = self.final_norm
        for layer in self.layers:
            total = total + layer.params * layer.count
        return total

    @property
    def params(self) -> Params:
        return self.embedding + self.body + self.head

    @property
    def num_params(self) -> int:
        return self.params.count

    @property
    def head_width(self) -> int:
        """Elements of the matrix that makes the logits, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def active_body(self) -> int:
        """Parameters that multiply with each token between embedding and head."""
        return self.final_norm.count + sum(layer.count * layer.active for layer in self.layers)

    @property
    def active_params(self) -> int:
        """What is usually quoted as active: body and both ends."""
        return self.embedding.count + self.active_body + self.head.count

    @property
    def largest_layer(self) -> LayerShape:
        return max(self.layers, key=lambda layer: layer.params.count)

    def components(self) -> dict[str, int]:
        """Parameters by component; they add up to num_params."""
        return {
            "embedding": self.embedding.count,
            "attention": sum(layer.count * layer.attention.params.count for layer in self.layers),
            "feed_forward": sum(layer.count * layer.feed_forward.params.count for layer in self.layers),
            "norms": self.final_norm.count + sum(layer.count * layer.norms.count for layer in self.layers),
            "head": self.head.count,
        }

    def with_layers(self, num_layers: int) -> ModelShape:
        """The same model, deeper or shallower: kinds of layers keep their shares, to rounding.

        Raises PlanError: no layer."""
        if num_layers < 1:
            raise PlanError(f"{self.name}: a model needs at least 1 layer, got {num_layers}")
        total = self.num_layers
        exact = [num_layers * layer.count / total for layer in self.layers]
        counts = [int(value) for value in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
        for index in by_remainder[: num_layers - sum(counts)]:
            counts[index] += 1
        layers = tuple(replace(layer, count=count) for layer, count in zip(self.layers, counts, strict=True) if count)
        return replace(self, layers=layers)
