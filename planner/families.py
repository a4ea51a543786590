"""From a Hugging Face config to a ModelShape: one entry a family, with the defaults of its config class.

Only config.json is read. What a file leaves out takes the value that the family's class in transformers has; a family
that is not here is refused by name rather than guessed. Vision towers and next-token heads are not counted: neither
teacher nor student loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.architecture import (
    AttentionShape,
    FeedForwardShape,
    LayerShape,
    ModelShape,
    NormStyle,
    Params,
    matrix,
    vector,
)
from planner.config_fields import Fields, text_config
from planner.errors import PlanError
from planner.layer_builders import (
    dense,
    dense_fused,
    experts,
    fused_query,
    grouped_query,
    hybrid,
    latent,
    leading_dense,
    shared_experts,
    shared_gated,
    sparse_step,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one model_type is built. `layer_kinds`: which kind of attention each layer has, where the family mixes."""

    attention: Callable[[Fields, str], AttentionShape]
    feed_forward: Callable[[Fields, int], FeedForwardShape]
    norms_per_layer: int = 2
    norm_style: NormStyle = "llama"
    has_post_norms: bool = False
    layer_kinds: Callable[[Fields], list[str]] | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)


def shape_of(raw: Mapping[str, object], *, name: str) -> ModelShape:
    """The shape of the text model that a config describes.

    Raises PlanError: an unknown family, a missing or impossible number."""
    text = text_config(raw, name=name)
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise PlanError(f"{name}: model_type {model_type!r} has no closed form here; known: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    fields = Fields(text, family.defaults, name=name)
    hidden, vocab_size, num_layers = fields.hidden, fields.size("vocab_size"), fields.num_layers
    kinds = ["full_attention"] * num_layers if family.layer_kinds is None else family.layer_kinds(fields)
    if len(kinds) != num_layers:
        raise PlanError(f"{name}: config names {len(kinds)} layer types for {num_layers} layers")
    groups: dict[tuple[AttentionShape, FeedForwardShape], int] = {}
    for index, kind in enumerate(kinds):
        layer = (family.attention(fields, kind), family.feed_forward(fields, index))
        groups[layer] = groups.get(layer, 0) + 1
    norms = vector(hidden, family.norms_per_layer)
    is_tied = fields.flag("tie_word_embeddings")
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=vocab_size,
        is_tied=is_tied,
        embedding=matrix(vocab_size, hidden),
        head=Params() if is_tied else matrix(hidden, vocab_size),
        final_norm=vector(hidden),
        layers=tuple(
            LayerShape(count=count, attention=attention, feed_forward=feed_forward, norms=norms)
            for (attention, feed_forward), count in groups.items()
        ),
        norm_style=family.norm_style,
        has_post_norms=family.has_post_norms,
    )


# ---- layer kinds -----------------------------------------------------------------------------------------------------


def _every(interval: str, *, regular: str, other: str) -> Callable[[Fields], list[str]]:
    """`layer_types` where the config lists them, else every n-th layer is `regular`."""

    def kinds(fields: Fields) -> list[str]:
        listed = fields.names("layer_types")
        if listed is not None:
            return listed
        step = fields.size(interval)
        return [other if (index + 1) % step else regular for index in range(fields.num_layers)]

    return kinds


def _all_sliding(fields: Fields) -> list[str]:
    kind = "full_attention" if fields.optional_size("sliding_window") is None else "sliding_attention"
    return [kind] * fields.num_layers


_HYBRID_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_HYBRID_KINDS = _every("full_attention_interval", regular="full_attention", other="linear_attention")
_LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}

_QWEN3_5 = Family(
    attention=hybrid, feed_forward=dense, norm_style="gemma", layer_kinds=_HYBRID_KINDS, defaults=_HYBRID_DEFAULTS
)
_QWEN3_5_MOE = Family(
    attention=hybrid,
    feed_forward=experts(shared=shared_gated),
    norm_style="gemma",
    layer_kinds=_HYBRID_KINDS,
    defaults=_HYBRID_DEFAULTS
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
_GEMMA3 = Family(
    attention=grouped_query(norm="head"),
    feed_forward=dense,
    norms_per_layer=4,
    norm_style="gemma",
    layer_kinds=_every("sliding_window_pattern", regular="full_attention", other="sliding_attention"),
    defaults={
        "head_dim": 256,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
_LATENT = Family(
    attention=latent,
    feed_forward=experts(num="n_routed_experts", shared=shared_experts, is_dense=leading_dense),
    defaults=_LATENT_DEFAULTS,
)

#: By model_type of the text config.
FAMILIES: dict[str, Family] = {
    "deepseek_v3": _LATENT,
    "gemma2": Family(
        attention=grouped_query(scores="softcap"),
        feed_forward=dense,
        norms_per_layer=4,
        norm_style="gemma",
        layer_kinds=_every("sliding_window_pattern", regular="full_attention", other="sliding_attention"),
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3_text": _GEMMA3,
    "glm4_moe": Family(
        attention=grouped_query(out_bias="no_bias", norm="optional"),
        feed_forward=experts(num="n_routed_experts", shared=shared_experts, is_dense=leading_dense),
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 8},
    ),
    "gpt_oss": Family(
        attention=grouped_query(scores="sinks"),
        feed_forward=experts(num="num_local_experts", width="intermediate_size", bias=True),
        layer_kinds=_every("sliding_window_pattern", regular="full_attention", other="sliding_attention"),
        defaults={
            "head_dim": 64,
            "attention_bias": True,
            "has_attention_sinks": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts_per_tok": 4,
        },
    ),
    "granite": Family(attention=grouped_query(), feed_forward=dense),
    "kimi_k2": _LATENT,
    "llama": Family(attention=grouped_query(), feed_forward=dense),
    "mistral": Family(
        attention=grouped_query(bias="no_bias", out_bias="no_bias"),
        feed_forward=dense,
        layer_kinds=_all_sliding,
        defaults={"num_key_value_heads": 8},
    ),
    "mixtral": Family(
        attention=grouped_query(bias="no_bias", out_bias="no_bias"),
        feed_forward=experts(num="num_local_experts", width="intermediate_size"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmo2": Family(attention=grouped_query(norm="flat"), feed_forward=dense, norm_style="gemma", has_post_norms=True),
    "phi3": Family(attention=fused_query, feed_forward=dense_fused),
    "qwen2": Family(
        attention=grouped_query(bias="has_query_bias", out_bias="no_bias"),
        feed_forward=dense,
        defaults={"has_query_bias": True},
    ),
    "qwen3": Family(attention=grouped_query(norm="head"), feed_forward=dense, defaults={"head_dim": 128}),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_moe": Family(
        attention=grouped_query(norm="head"),
        feed_forward=experts(is_dense=sparse_step),
        defaults={"decoder_sparse_step": 1, "num_experts_per_tok": 8},
    ),
}
