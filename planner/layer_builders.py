"""Attention and feed-forward parts of known families, built from their configs: parameters, tensors and widths."""

from __future__ import annotations

from collections.abc import Callable

from planner.architecture import AttentionShape, FeedForwardShape, Params, Scores, matrix, vector
from planner.config_fields import Fields
from planner.errors import PlanError

# ---- attention -------------------------------------------------------------------------------------------------------


def grouped_query(
    *,
    bias: str = "attention_bias",
    out_bias: str = "attention_bias",
    norm: str = "none",
    gate: bool = False,
    scores: Scores = "kernel",
) -> Callable[[Fields, str], AttentionShape]:
    """Attention with query and key/value heads. bias, out_bias: the flag that says whether projections have one.

    norm: of queries and keys: none, head (one weight of a head's width each), flat (over all heads)."""

    def build(fields: Fields, kind: str) -> AttentionShape:
        hidden, head_dim = fields.hidden, fields.head_dim
        num_heads = fields.size("num_attention_heads")
        num_kv_heads = fields.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise PlanError(f"{fields.name}: {num_heads} attention heads don't share {num_kv_heads} key/value heads")
        query, kv = num_heads * head_dim, num_kv_heads * head_dim
        has_bias = fields.flag(bias)
        params = matrix(hidden, query * (2 if gate else 1), bias=has_bias)
        params = params + matrix(hidden, kv, bias=has_bias) * 2 + matrix(query, hidden, bias=fields.flag(out_bias))
        wants_norm = norm if norm != "optional" else ("head" if fields.flag("use_qk_norm") else "none")
        if wants_norm == "head":
            params = params + vector(head_dim, 2)
        elif wants_norm == "flat":
            params = params + vector(query) + vector(kv)
        if fields.flag("has_attention_sinks"):
            params = params + vector(num_heads)
        is_sliding = kind in ("sliding_attention", "chunked_attention")
        return AttentionShape(
            kind="sliding" if is_sliding else "full",
            params=params,
            num_heads=num_heads,
            query_width=query,
            key_width=kv,
            value_width=kv,
            output_width=query,
            norm_width=0 if wants_norm == "none" else query + kv,
            window_tokens=fields.optional_size("sliding_window") if is_sliding else None,
            has_gate=gate,
            scores=scores,
        )

    return build


def fused_query(fields: Fields, kind: str) -> AttentionShape:
    """Phi-3: one matrix makes queries, keys and values."""
    separate = grouped_query()(fields, kind)
    width = separate.query_width + separate.key_width + separate.value_width
    params = matrix(fields.hidden, width) + matrix(separate.query_width, fields.hidden)
    return AttentionShape(**(vars(separate) | {"params": params, "num_inputs": 1, "is_fused": True}))


def latent(fields: Fields, kind: str) -> AttentionShape:
    """Multi-head latent attention: low-rank projections of queries, keys and values."""
    hidden, num_heads = fields.hidden, fields.size("num_attention_heads")
    rope, plain = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    value_dim, kv_rank = fields.size("v_head_dim"), fields.size("kv_lora_rank")
    query_rank, bias = fields.optional_size("q_lora_rank"), fields.flag("attention_bias")
    query = num_heads * (rope + plain)
    if query_rank is None:
        params = matrix(hidden, query)
    else:
        params = matrix(hidden, query_rank, bias=bias) + vector(query_rank) + matrix(query_rank, query)
    params = params + matrix(hidden, kv_rank + rope, bias=bias) + vector(kv_rank)
    params = params + matrix(kv_rank, num_heads * (plain + value_dim))
    params = params + matrix(num_heads * value_dim, hidden, bias=bias)
    return AttentionShape(
        kind="latent",
        params=params,
        num_heads=num_heads,
        query_width=query,
        key_width=query,
        value_width=num_heads * value_dim,
        output_width=num_heads * value_dim,
        num_inputs=2,
        latent_width=(query_rank or 0) + kv_rank + rope,
    )


def hybrid(fields: Fields, kind: str) -> AttentionShape:
    """Qwen3.5: gated full attention, or a gated delta net."""
    if kind == "full_attention":
        return grouped_query(norm="head", gate=True)(fields, kind)
    hidden = fields.hidden
    key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys + values
    params = matrix(hidden, mixed) + matrix(hidden, values) + matrix(hidden, value_heads) * 2
    params = params + matrix(fields.size("linear_conv_kernel_dim"), mixed)
    params = params + vector(value_heads, 2) + vector(value_dim) + matrix(values, hidden)
    return AttentionShape(
        kind="delta",
        params=params,
        num_heads=value_heads,
        query_width=keys,
        key_width=keys,
        value_width=values,
        output_width=values,
        num_inputs=4,
        state_width=value_heads * key_dim * value_dim,
    )


# ---- feed-forward ----------------------------------------------------------------------------------------------------


def dense(fields: Fields, index: int) -> FeedForwardShape:
    """Gate, up and down."""
    return gated(fields, fields.size("intermediate_size"), bias=fields.flag("mlp_bias"))


def gated(fields: Fields, width: int, *, bias: bool = False) -> FeedForwardShape:
    params = matrix(fields.hidden, width, bias=bias) * 2 + matrix(width, fields.hidden, bias=bias)
    return FeedForwardShape(params=params, active=params.count, width=width)


def dense_fused(fields: Fields, index: int) -> FeedForwardShape:
    """Phi-3: gate and up are one matrix."""
    width = fields.size("intermediate_size")
    params = matrix(fields.hidden, 2 * width) + matrix(width, fields.hidden)
    return FeedForwardShape(params=params, active=params.count, width=width)


def experts(
    *,
    num: str = "num_experts",
    width: str = "moe_intermediate_size",
    shared: Callable[[Fields], tuple[Params, int]] | None = None,
    is_dense: Callable[[Fields, int], bool] | None = None,
    bias: bool = False,
) -> Callable[[Fields, int], FeedForwardShape]:
    """A router and its experts, stacked in two tensors. shared: parameters and width of what every token meets."""

    def build(fields: Fields, index: int) -> FeedForwardShape:
        if is_dense is not None and is_dense(fields, index):
            return dense(fields, index)
        hidden, num_experts, expert_width = fields.hidden, fields.size(num), fields.size(width)
        top_k = fields.size("num_experts_per_tok")
        if top_k > num_experts:
            raise PlanError(
                f"{fields.name}: config.num_experts_per_tok is {top_k}; allowed: at most the {num_experts} experts"
            )
        one = 3 * hidden * expert_width + (2 * expert_width + hidden if bias else 0)
        router = matrix(hidden, num_experts, bias=bias)
        shared_params, shared_width = shared(fields) if shared else (Params(), 0)
        stacked = Params(one * num_experts, 4 if bias else 2, 2 * hidden * expert_width * num_experts)
        params = stacked + router + shared_params
        return FeedForwardShape(
            params=params,
            active=one * top_k + router.count + shared_params.count,
            width=top_k * expert_width + shared_width,
            num_experts=num_experts,
            top_k=top_k,
            has_shared=shared_width > 0,
        )

    return build


def shared_gated(fields: Fields) -> tuple[Params, int]:
    """Qwen3.5: one shared expert behind a gate."""
    width = fields.size("shared_expert_intermediate_size")
    return gated(fields, width).params + matrix(fields.hidden, 1), width


def shared_experts(fields: Fields) -> tuple[Params, int]:
    """DeepSeek-V3, GLM-4.5: shared experts as one wide one."""
    width = fields.size("moe_intermediate_size") * fields.count("n_shared_experts")
    return (gated(fields, width).params, width) if width else (Params(), 0)


def leading_dense(fields: Fields, index: int) -> bool:
    return index < fields.count("first_k_dense_replace")


def sparse_step(fields: Fields, index: int) -> bool:
    listed = str(index) in (fields.names("mlp_only_layers") or [])
    return listed or (index + 1) % fields.size("decoder_sparse_step") != 0
