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
    Scores,
    matrix,
    vector,
)
from planner.errors import PlanError

#: Larger numbers in a config are a mistake; they would only make a page of digits.
MAX_SIZE = 10**9


class Fields:
    """A config that is read by name, and complains by name."""

    def __init__(self, raw: Mapping[str, object], defaults: Mapping[str, object], *, name: str) -> None:
        # A null in the file is a value: it replaces the default.
        self._values = {**defaults, **raw}
        self._name = name

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        return self._number(key, default, least=1)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0."""
        return self._number(key, default, least=0)

    def _number(self, key: str, default: int | None, *, least: int) -> int:
        found = self._values.get(key)
        value = default if found is None else found
        if value is None:
            raise PlanError(f"{self._name}: its config has no {key}, which the parameters follow from")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            raise PlanError(f"{self._name}: config.{key} is {value!r}; allowed: a whole number, {least} to {MAX_SIZE}")
        return value

    def optional_size(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.size(key)

    def flag(self, key: str) -> bool:
        return bool(self._values.get(key))

    def names(self, key: str) -> list[str] | None:
        """A list, one entry a layer."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise PlanError(f"{self._name}: config.{key} is {value!r}; allowed: a list")
        return [str(item) for item in value]

    @property
    def name(self) -> str:
        return self._name

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def head_dim(self) -> int:
        heads = self.size("num_attention_heads")
        if self.optional_size("head_dim") is None and self.hidden % heads:
            raise PlanError(f"{self._name}: hidden_size {self.hidden} is not a multiple of {heads} attention heads")
        return self.size("head_dim", self.hidden // heads)


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
    hidden, vocab_size, num_layers = fields.hidden, fields.size("vocab_size"), fields.size("num_hidden_layers")
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


def text_config(raw: Mapping[str, object], *, name: str) -> Mapping[str, object]:
    """The language model's part of a config that also holds a vision tower."""
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, Mapping):
        raise PlanError(f"{name}: config.text_config is {nested!r}; allowed: an object")
    outer = raw.get("model_type")
    inherited = {"model_type": f"{outer}_text"} if "model_type" not in nested else {}
    if "tie_word_embeddings" in raw and "tie_word_embeddings" not in nested:
        inherited["tie_word_embeddings"] = raw["tie_word_embeddings"]  # type: ignore[assignment]
    return {**nested, **inherited}


# ---- attention -------------------------------------------------------------------------------------------------------


def _grouped_query(
    *, bias: str = "attention_bias", out_bias: str = "attention_bias", norm: str = "none", gate: bool = False, scores: Scores = "kernel"
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


def _fused_query(fields: Fields, kind: str) -> AttentionShape:
    """Phi-3: one matrix makes queries, keys and values."""
    separate = _grouped_query()(fields, kind)
    width = separate.query_width + separate.key_width + separate.value_width
    params = matrix(fields.hidden, width) + matrix(separate.query_width, fields.hidden)
    return AttentionShape(**(vars(separate) | {"params": params, "num_inputs": 1, "is_fused": True}))


def _latent(fields: Fields, kind: str) -> AttentionShape:
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


def _hybrid(fields: Fields, kind: str) -> AttentionShape:
    """Qwen3.5: gated full attention, or a gated delta net."""
    if kind == "full_attention":
        return _grouped_query(norm="head", gate=True)(fields, kind)
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


def _dense(fields: Fields, index: int) -> FeedForwardShape:
    """Gate, up and down."""
    return _gated(fields, fields.size("intermediate_size"), bias=fields.flag("mlp_bias"))


def _gated(fields: Fields, width: int, *, bias: bool = False) -> FeedForwardShape:
    params = matrix(fields.hidden, width, bias=bias) * 2 + matrix(width, fields.hidden, bias=bias)
    return FeedForwardShape(params=params, active=params.count, width=width)


def _dense_fused(fields: Fields, index: int) -> FeedForwardShape:
    """Phi-3: gate and up are one matrix."""
    width = fields.size("intermediate_size")
    params = matrix(fields.hidden, 2 * width) + matrix(width, fields.hidden)
    return FeedForwardShape(params=params, active=params.count, width=width)


def _experts(
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
            return _dense(fields, index)
        hidden, num_experts, expert_width = fields.hidden, fields.size(num), fields.size(width)
        top_k = fields.size("num_experts_per_tok")
        if top_k > num_experts:
            raise PlanError(f"{fields.name}: {top_k} experts a token, of {num_experts}")
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


def _shared_gated(fields: Fields) -> tuple[Params, int]:
    """Qwen3.5: one shared expert behind a gate."""
    width = fields.size("shared_expert_intermediate_size")
    return _gated(fields, width).params + matrix(fields.hidden, 1), width


def _shared_experts(fields: Fields) -> tuple[Params, int]:
    """DeepSeek-V3, GLM-4.5: shared experts as one wide one."""
    width = fields.size("moe_intermediate_size") * fields.count("n_shared_experts")
    return (_gated(fields, width).params, width) if width else (Params(), 0)


def _leading_dense(fields: Fields, index: int) -> bool:
    return index < fields.count("first_k_dense_replace")


def _sparse_step(fields: Fields, index: int) -> bool:
    listed = str(index) in (fields.names("mlp_only_layers") or [])
    return listed or (index + 1) % fields.size("decoder_sparse_step") != 0


# ---- layer kinds -----------------------------------------------------------------------------------------------------


def _every(interval: str, *, regular: str, other: str) -> Callable[[Fields], list[str]]:
    """`layer_types` where the config lists them, else every n-th layer is `regular`."""

    def kinds(fields: Fields) -> list[str]:
        listed = fields.names("layer_types")
        if listed is not None:
            return listed
        step = fields.size(interval)
        return [other if (index + 1) % step else regular for index in range(fields.size("num_hidden_layers"))]

    return kinds


def _all_sliding(fields: Fields) -> list[str]:
    kind = "full_attention" if fields.optional_size("sliding_window") is None else "sliding_attention"
    return [kind] * fields.size("num_hidden_layers")


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
    attention=_hybrid, feed_forward=_dense, norm_style="gemma", layer_kinds=_HYBRID_KINDS, defaults=_HYBRID_DEFAULTS
)
_QWEN3_5_MOE = Family(
    attention=_hybrid,
    feed_forward=_experts(shared=_shared_gated),
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
    attention=_grouped_query(norm="head"),
    feed_forward=_dense,
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
    attention=_latent,
    feed_forward=_experts(num="n_routed_experts", shared=_shared_experts, is_dense=_leading_dense),
    defaults=_LATENT_DEFAULTS,
)

#: By model_type of the text config.
FAMILIES: dict[str, Family] = {
    "deepseek_v3": _LATENT,
    "gemma2": Family(
        attention=_grouped_query(scores="softcap"),
        feed_forward=_dense,
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
        attention=_grouped_query(out_bias="no_bias", norm="optional"),
        feed_forward=_experts(num="n_routed_experts", shared=_shared_experts, is_dense=_leading_dense),
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 8},
    ),
    "gpt_oss": Family(
        attention=_grouped_query(scores="sinks"),
        feed_forward=_experts(num="num_local_experts", width="intermediate_size", bias=True),
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
    "granite": Family(attention=_grouped_query(), feed_forward=_dense),
    "kimi_k2": _LATENT,
    "llama": Family(attention=_grouped_query(), feed_forward=_dense),
    "mistral": Family(
        attention=_grouped_query(bias="no_bias", out_bias="no_bias"),
        feed_forward=_dense,
        layer_kinds=_all_sliding,
        defaults={"num_key_value_heads": 8},
    ),
    "mixtral": Family(
        attention=_grouped_query(bias="no_bias", out_bias="no_bias"),
        feed_forward=_experts(num="num_local_experts", width="intermediate_size"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmo2": Family(
        attention=_grouped_query(norm="flat"), feed_forward=_dense, norm_style="gemma", has_post_norms=True
    ),
    "phi3": Family(attention=_fused_query, feed_forward=_dense_fused),
    "qwen2": Family(
        attention=_grouped_query(bias="has_query_bias", out_bias="no_bias"),
        feed_forward=_dense,
        defaults={"has_query_bias": True},
    ),
    "qwen3": Family(attention=_grouped_query(norm="head"), feed_forward=_dense, defaults={"head_dim": 128}),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_moe": Family(
        attention=_grouped_query(norm="head"),
        feed_forward=_experts(is_dense=_sparse_step),
        defaults={"decoder_sparse_step": 1, "num_experts_per_tok": 8},
    ),
}
