"""Well-known models by name, and where a model that is no preset is found: a directory, a config.json, or the cache of
the Hugging Face hub. Nothing is downloaded.

A preset is the handful of public numbers that parameters and activations follow from, in the words of the model's own
config; tests hold the resulting counts against the real classes and against published ones.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from planner.architecture import ModelShape
from planner.errors import PlanError
from planner.families import shape_of

logger = logging.getLogger(__name__)

Config = Mapping[str, object]


def _dense(model_type: str, **numbers: object) -> dict[str, object]:
    return {"model_type": model_type, **numbers}


def _sizes(hidden: int, layers: int, width: int | None, heads: int, kv_heads: int, **more: object) -> dict[str, object]:
    """The five numbers that every decoder has."""
    sizes: dict[str, object] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return sizes | ({} if width is None else {"intermediate_size": width}) | more


def _qwen3_5(hidden: int, layers: int, width: int, heads: int, kv_heads: int, **more: object) -> dict[str, object]:
    return _dense("qwen3_5_text", vocab_size=248_320, **_sizes(hidden, layers, width, heads, kv_heads), **more)


def _qwen3_5_moe(hidden: int, layers: int, heads: int, kv_heads: int, **more: object) -> dict[str, object]:
    return _dense("qwen3_5_moe_text", vocab_size=248_320, **_sizes(hidden, layers, None, heads, kv_heads), **more)


def _qwen3(hidden: int, layers: int, width: int, heads: int, *, tied: bool = False) -> dict[str, object]:
    sizes = _sizes(hidden, layers, width, heads, 8)
    return _dense("qwen3", vocab_size=151_936, head_dim=128, tie_word_embeddings=tied, **sizes)


def _qwen3_moe(hidden: int, layers: int, heads: int, expert_width: int) -> dict[str, object]:
    return _dense(
        "qwen3_moe",
        vocab_size=151_936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_width,
        **_sizes(hidden, layers, 6144, heads, 4),
    )


def _llama(hidden: int, layers: int, width: int, heads: int, *, tied: bool = False) -> dict[str, object]:
    sizes = _sizes(hidden, layers, width, heads, 8)
    return _dense("llama", vocab_size=128_256, tie_word_embeddings=tied, **sizes)


def _gemma3(
    hidden: int, layers: int, width: int, heads: int, kv_heads: int, *, head_dim: int = 256, vocab_size: int = 262_208
) -> dict[str, object]:
    sizes = _sizes(hidden, layers, width, heads, kv_heads)
    return _dense("gemma3_text", vocab_size=vocab_size, head_dim=head_dim, sliding_window=1024, **sizes)


def _deepseek(vocab_size: int, heads: int, num_experts: int, leading_dense: int) -> dict[str, object]:
    return _dense(
        "deepseek_v3",
        vocab_size=vocab_size,
        q_lora_rank=1536,
        n_routed_experts=num_experts,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=leading_dense,
        **_sizes(7168, 61, 18_432, heads, heads),
    )


def _gpt_oss(layers: int, num_experts: int) -> dict[str, object]:
    return _dense("gpt_oss", vocab_size=201_088, num_local_experts=num_experts, **_sizes(2880, layers, 2880, 64, 8))


def _glm4_moe(hidden: int, layers: int, width: int, **more: object) -> dict[str, object]:
    return _dense(
        "glm4_moe",
        vocab_size=151_552,
        head_dim=128,
        attention_bias=True,
        **_sizes(hidden, layers, width, 96, 8),
        **more,
    )


#: The public numbers of each preset, under the name that people know it by.
PRESETS: dict[str, Config] = {
    "Qwen3.5-0.8B": _qwen3_5(1024, 24, 3584, 8, 2, linear_num_value_heads=16, tie_word_embeddings=True),
    "Qwen3.5-2B": _qwen3_5(2048, 24, 6144, 8, 2, linear_num_value_heads=16, tie_word_embeddings=True),
    "Qwen3.5-4B": _qwen3_5(2560, 32, 9216, 16, 4, tie_word_embeddings=True),
    "Qwen3.5-9B": _qwen3_5(4096, 32, 12_288, 16, 4),
    "Qwen3.5-27B": _qwen3_5(5120, 64, 17_408, 24, 4, linear_num_value_heads=48),
    "Qwen3.5-35B-A3B": _qwen3_5_moe(2048, 40, 16, 2),
    "Qwen3.5-122B-A10B": _qwen3_5_moe(
        3072, 48, 32, 2, linear_num_value_heads=64, moe_intermediate_size=1024, shared_expert_intermediate_size=1024
    ),
    "Qwen3.5-397B-A17B": _qwen3_5_moe(
        4096,
        60,
        32,
        2,
        linear_num_value_heads=64,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "Qwen3-0.6B": _qwen3(1024, 28, 3072, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 6144, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 9728, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 12_288, 32),
    "Qwen3-14B": _qwen3(5120, 40, 17_408, 40),
    "Qwen3-32B": _qwen3(5120, 64, 25_600, 64),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 768),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 1536),
    "Llama-3.2-1B": _llama(2048, 16, 8192, 32, tied=True),
    "Llama-3.2-3B": _llama(3072, 28, 8192, 24, tied=True),
    "Llama-3.1-8B": _llama(4096, 32, 14_336, 32),
    "Llama-3.1-70B": _llama(8192, 80, 28_672, 64),
    "Llama-3.1-405B": _llama(16_384, 126, 53_248, 128),
    "DeepSeek-V3": _deepseek(129_280, 128, 256, 3),
    "Kimi-K2": _deepseek(163_840, 64, 384, 1),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "GLM-4.5-Air": _glm4_moe(
        4096, 46, 10_944, moe_intermediate_size=1408, n_routed_experts=128, first_k_dense_replace=1
    ),
    "GLM-4.5": _glm4_moe(
        5120,
        92,
        12_288,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        first_k_dense_replace=3,
        use_qk_norm=True,
    ),
    "Gemma-3-1B": _gemma3(1152, 26, 6912, 4, 1, vocab_size=262_144),
    "Gemma-3-4B": _gemma3(2560, 34, 10_240, 8, 4),
    "Gemma-3-12B": _gemma3(3840, 48, 15_360, 16, 8),
    "Gemma-3-27B": _gemma3(5376, 62, 21_504, 32, 16, head_dim=128),
    "Mistral-7B-v0.3": _dense("mistral", vocab_size=32_768, **_sizes(4096, 32, 14_336, 32, 8)),
    "Phi-3-mini": _dense("phi3", vocab_size=32_064, **_sizes(3072, 32, 8192, 32, 32)),
}


def find_model(name: str, *, flag: str) -> ModelShape:
    """The shape of a preset (case does not matter), a checkpoint directory, a config.json, or a hub id in the cache.

    An owner/name that is nowhere on this machine is taken as the preset of that name, which is logged.
    Raises PlanError: nothing of that name; a config that can't be read."""
    if not name:
        raise PlanError(f"{flag} is empty; allowed: a preset (--list), a directory or a config.json")
    try:
        found = _found_here(name, flag=flag)
        is_path = _is_path(name)
    except (OSError, RuntimeError, ValueError) as error:
        # No file can have such a name, it may not be looked at, or ~user is nobody.
        if isinstance(error, PlanError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise PlanError(f"{flag} {name}: {reason}; allowed: a preset (--list), a directory or a config.json") from error
    if found is not None:
        return found
    by_lower = {preset.lower(): preset for preset in PRESETS}
    preset = by_lower.get(name.rsplit("/", 1)[-1].lower())
    if preset is not None and is_path:
        raise PlanError(f"{flag} {name}: no such directory or file; allowed: one that is there, or the preset {preset}")
    if preset is not None:
        if "/" in name:
            logger.warning("%s %s: no directory and not in the cache; the preset %s is taken", flag, name, preset)
        return shape_of(PRESETS[preset], name=preset)
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), by_lower, n=3, cutoff=0.0)
    raise PlanError(
        f"{flag} {name}: no preset, no directory, no config.json and no hub id in the cache; allowed: one of these; "
        f"--list shows the presets, the nearest are {', '.join(by_lower[each] for each in near)}"
    )


def _found_here(name: str, *, flag: str) -> ModelShape | None:
    """From a directory, a config.json or the hub's cache. Raises PlanError, and what looking at a path raises."""
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            raise PlanError(
                f"{flag} {name}: a directory without a config.json; allowed: a checkpoint as Hugging Face saves it"
            )
        return shape_of(_read(file, flag=flag), name=path.name if path.is_dir() else path.parent.name or name)
    cached = _cached_config(name)
    return None if cached is None else shape_of(_read(cached, flag=flag), name=name)


def _is_path(name: str) -> bool:
    """Whether it can't be meant as an owner/name of the hub."""
    owner, _, _ = name.rpartition("/")
    return name.startswith((".", "/", "~")) or "/" in owner or (owner != "" and Path(owner).exists())


def _read(file: Path, *, flag: str) -> Config:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{flag}: {file} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{flag}: {file} is no JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(raw, dict):
        raise PlanError(f"{flag}: {file} holds {type(raw).__name__}; allowed: an object, as in a Hugging Face config")
    return raw


def _cached_config(name: str) -> Path | None:
    """The newest snapshot's config.json of a hub id in the local cache."""
    if name.count("/") != 1 or name.startswith((".", "/")) or ".." in name:
        return None
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = list((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return max(found, key=lambda path: path.stat().st_mtime) if found else None
