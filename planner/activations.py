"""Bytes that one layer's forward pass leaves for its backward pass, per token, counted operation by operation.

The counts follow what transformers' layers do on torch's autograd: every tensor that an operation saves, once for each
storage. A test compares them with the storages that autograd really holds, family by family. They hold for attention
kernels that never write the scores down (SDPA's flash and efficient kernels).

Letters: d hidden, q / k / v widths of queries, keys and values, f intermediate elements a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.architecture import AttentionShape, FeedForwardShape, LayerShape, ModelShape, NormStyle

#: How products are made. bf16: weights and states are bf16 (sharded training with a bf16 parameter dtype). autocast:
#: float32 weights, products in bf16 (what one trainer process does). fp32: everything in float32.
Arithmetic = Literal["bf16", "autocast", "fp32"]
#: Who computes the gated delta rule: a fused kernel, or transformers' own torch code (without flash-linear-attention).
DeltaKernel = Literal["fused", "torch"]
#: Tokens of a chunk of the delta rule.
CHUNK_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class ElementBytes:
    """stream: of the residual stream; product: of a matrix product's operands; casts: each product that reads a
    normed state saves its own cast copy of it."""

    stream: int
    product: int
    casts: bool


ELEMENT_BYTES: dict[Arithmetic, ElementBytes] = {
    "bf16": ElementBytes(stream=2, product=2, casts=False),
    "autocast": ElementBytes(stream=4, product=2, casts=True),
    "fp32": ElementBytes(stream=4, product=4, casts=False),
}


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes a token. `saved`: held until the layer's backward pass. `working`: the most that a pass without gradients
    has at one time, and, since a gradient is as large as what it is of, what a backward pass has beside `saved`."""

    saved: int
    working: int


def norm_bytes(width: int, num_norms: int, input_bytes: int, style: NormStyle) -> int:
    """An RMS norm over `width` elements in `num_norms` groups: its input in float32 (a copy where it comes in 16
    bits), one float32 a group, and the normed input before the weight."""
    normed = 4 if style == "gemma" or input_bytes == 4 else 2
    return width * (4 + normed) + 4 * num_norms


def linear_input_bytes(width: int, num_products: int, element: ElementBytes) -> int:
    """What products that all read one normed state save of it."""
    return width * element.product * (num_products if element.casts else 1)


def layer_activations(
    layer: LayerShape,
    model: ModelShape,
    arithmetic: Arithmetic,
    *,
    sequence_tokens: int,
    delta_kernel: DeltaKernel = "fused",
    tp: int = 1,
) -> LayerActivations:
    """Of one layer. tp: ranks that share its heads and intermediate elements; the stream is on each of them."""
    element, hidden = ELEMENT_BYTES[arithmetic], model.hidden_size
    attention, feed_forward = layer.attention, layer.feed_forward
    norms = layer.norms.tensors
    # Norms behind attention and feed-forward (Gemma's further two, all of OLMo 2's) read what products gave.
    num_behind = norms if model.has_post_norms else norms - 2
    saved = (norms - num_behind) * norm_bytes(hidden, 1, element.stream, model.norm_style)
    saved += num_behind * norm_bytes(hidden, 1, element.product, model.norm_style)
    saved += linear_input_bytes(hidden, attention.num_inputs, element)
    saved += _attention_saved(attention, element, model.norm_style, sequence_tokens, delta_kernel) // tp
    saved += _feed_forward_saved(feed_forward, hidden, element, tp)
    stream, product = hidden * element.stream, element.product
    widths = attention.query_width + attention.key_width + attention.value_width
    mixing = (widths + attention.latent_width) * product + widths * 8
    if attention.kind == "delta" and delta_kernel == "torch":
        mixing = _delta_torch_saved(attention, element, sequence_tokens) + widths * 8
    routed = hidden * product * feed_forward.top_k
    working = 2 * stream + hidden * product + max(mixing // tp, 3 * feed_forward.width * product // tp + 2 * routed)
    return LayerActivations(saved=saved, working=working)


def _attention_saved(
    attention: AttentionShape, element: ElementBytes, style: NormStyle, sequence_tokens: int, kernel: DeltaKernel
) -> int:
    if attention.kind == "delta":
        return (
            _delta_torch_saved(attention, element, sequence_tokens)
            if kernel == "torch"
            else _delta_fused_saved(attention, element)
        )
    product = element.product
    keys, values = attention.key_width, attention.value_width
    window = attention.window_tokens
    has_mask = attention.kind == "sliding" and window is not None and window < sequence_tokens
    if has_mask or attention.scores != "kernel":
        # With an explicit mask, or by hand, keys and values are repeated for every query head.
        keys = values = attention.query_width
    saved = product * (attention.query_width + keys + values) + 4 * attention.num_heads
    saved += product * attention.output_width
    if has_mask:
        # The mask as what is added to the scores.
        saved += product * sequence_tokens
    if attention.is_fused:
        # The values are a slice of one projection, all of which is held; the output is copied once more.
        saved += product * (attention.query_width + keys + attention.output_width)
    if attention.scores != "kernel":
        # Every score is written down: after the cap and after the softmax, or, beside sinks, after the softmax twice.
        saved += attention.num_heads * sequence_tokens * (8 if attention.scores == "softcap" else 2 * product)
    if attention.norm_width:
        head_dim = attention.query_width // attention.num_heads
        num_norms = attention.norm_width // head_dim
        saved += norm_bytes(attention.norm_width, num_norms, product, style)
    if attention.has_gate:
        # The sigmoid, and the gated output that the last product reads. The queries are half of a wider projection:
        # in float32 their norm holds all of it.
        saved += 2 * product * attention.output_width
        saved += product * attention.query_width if product == 4 else 0
    if attention.latent_width:
        # Low-rank projections: normed in float32, and read by the products that widen them.
        saved += norm_bytes(attention.latent_width, 2, product, style)
        saved += product * attention.latent_width
    return saved


def _delta_fused_saved(attention: AttentionShape, element: ElementBytes) -> int:
    """Gated delta net on fused kernels: convolution's input and output, the kernel's inputs and its chunk matrices, the
    output, and the gated norm."""
    product, heads = element.product, attention.num_heads
    mixed = attention.query_width + attention.key_width + attention.value_width
    values = attention.value_width
    chunks = CHUNK_TOKENS * heads * product + attention.state_width // CHUNK_TOKENS * product
    return product * 2 * mixed + chunks + 16 * heads + values * (product * 4 + 4)


def _delta_torch_saved(attention: AttentionShape, element: ElementBytes, sequence_tokens: int) -> int:
    """Gated delta net in transformers' own torch code, which works in float32 on keys repeated for every value head;
    under autocast its products save 16-bit copies instead."""
    product, heads = element.product, attention.num_heads
    mixed = attention.query_width + attention.key_width + attention.value_width
    values = attention.value_width
    repeated_keys = attention.state_width // (values // heads)
    key_bytes, chunk_bytes, state_bytes = (38, 14, 8) if element.casts else (48 if product == 4 else 36, 20, 4)
    rule = key_bytes * repeated_keys + 12 * values + chunk_bytes * CHUNK_TOKENS * heads
    rule += state_bytes * attention.state_width // CHUNK_TOKENS + 40 * heads
    # Sequences are padded to whole chunks.
    rule = rule * -(-sequence_tokens // CHUNK_TOKENS) * CHUNK_TOKENS // sequence_tokens
    # Gated norm: float32 copy, normed, weighted, the gate in float32 and its silu; then the last product's input.
    gated_norm = values * (4 + product + 4 + 4 + 4) + values * product + 4 * heads
    return 2 * product * mixed + rule + gated_norm


def _feed_forward_saved(shape: FeedForwardShape, hidden: int, element: ElementBytes, tp: int) -> int:
    """Gate, its activation, up, and their product, which the last matrix reads."""
    product = element.product
    inner = 4 * shape.width * product // tp
    if not shape.top_k:
        return linear_input_bytes(hidden, 1 if _is_fused(shape) else 2, element) + inner
    # Routed: the router's input and softmax, each expert's gathered input and its output before the weighted sum.
    routing = hidden * product + 4 * shape.num_experts + 20 * shape.top_k
    if shape.has_shared:
        # What every token meets reads the same input, and its output is weighted too.
        routing += hidden * product * (4 if element.casts else 1)
    return routing + inner + 2 * shape.top_k * hidden * product


def _is_fused(shape: FeedForwardShape) -> bool:
    """Whether gate and up are one matrix: two tensors instead of three."""
    return shape.params.tensors == 2


def saved_bytes(
    model: ModelShape,
    arithmetic: Arithmetic,
    *,
    sequence_tokens: int,
    delta_kernel: DeltaKernel = "fused",
    tp: int = 1,
) -> int:
    """Of the whole body, per token: all layers, and the final norm."""
    layers = sum(
        layer.count
        * layer_activations(
            layer, model, arithmetic, sequence_tokens=sequence_tokens, delta_kernel=delta_kernel, tp=tp
        ).saved
        for layer in model.layers
    )
    return layers + norm_bytes(model.hidden_size, 1, ELEMENT_BYTES[arithmetic].stream, model.norm_style)
