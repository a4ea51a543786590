"""Tiny random checkpoints of real Hugging Face families, with a real tokenizer, for every test that needs a model.

The weights are random, but the classes, the file layout and the tokenizer are the real ones, so what holds here holds
for the checkpoints that users bring: tied heads, hybrid linear attention, experts, softcaps, logit scales, biases.
Everything is seeded: the same call writes the same bytes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENIZER_VOCAB = 320
MAX_POSITIONS = 128
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|turn|>", "<|end|>"

# Repetitive on purpose: 60 merges above the 256 bytes are learned from it, words and code alike.
_CORPUS = [
    "The teacher reads the text once and keeps the states; the student reads the states and learns the text.",
    "A slot carries one request. When the slot is free, the next request takes the slot, and the ring turns.",
    "def release(self, slot: int) -> None:\n    if slot not in self.leases:\n        raise ValueError(slot)\n",
    "for step in range(num_steps):\n    loss = student(batch)\n    loss.backward()\n    optimizer.step()\n",
    "Water runs down the hill, under the bridge and past the mill, and the mill grinds the corn in the morning.",
    "return [row for row in rows if row.counts and row.label != ignore_index]\n",
    "There were three of them in the boat, and none of the three could say where the other shore was.",
    "In the beginning the losses are large, then the losses fall, and in the end the losses stay where they are.",
]

# Roles and their text between markers; the generation block marks what the assistant wrote.
_CHAT_TEMPLATE = (
    "{% for m in messages %}" + TURN_START + "{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}" + TURN_END + "{% endgeneration %}"
    "{% else %}{{ m['content'] }}" + TURN_END + "{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}" + TURN_START + "assistant\n{% endif %}"
)


@lru_cache(maxsize=1)
def _trained_tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return str(tokenizer.to_str())


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly TOKENIZER_VOCAB tokens, with a chat template. A fresh object each call."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer_json()),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def _common(hidden_size: int, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.15,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
    }


def _linear_attention() -> dict[str, Any]:
    # One gated delta net, one full-attention layer: the smallest hybrid.
    return {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }


def _without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def _settings(family: str, common: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """The family's config class and its arguments."""
    match family:
        case "qwen3":
            return transformers.Qwen3Config, common | {"tie_word_embeddings": True}
        case "qwen3_5":
            return transformers.Qwen3_5TextConfig, common | _linear_attention() | {"tie_word_embeddings": True}
        case "qwen3_5_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
            ffn = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
            settings = _without(common, "intermediate_size") | _linear_attention() | experts | ffn
            return transformers.Qwen3_5MoeTextConfig, settings
        case "llama":
            return transformers.LlamaConfig, common | {"tie_word_embeddings": False}
        case "gemma3":
            layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
            # A cap that the logits of random weights reach: with the usual 30 its loss would go unseen.
            return transformers.Gemma3TextConfig, common | layers | {"final_logit_softcapping": 3.0}
        case "granite":
            multipliers = {"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
            return transformers.GraniteConfig, _without(common, "head_dim") | multipliers | {
                "tie_word_embeddings": True
            }
        case "gpt2":
            sizes = {"n_embd": common["hidden_size"], "n_layer": 2, "n_head": 2, "n_positions": MAX_POSITIONS}
            names = ("vocab_size", "initializer_range", "eos_token_id", "pad_token_id", "bos_token_id")
            return transformers.GPT2Config, sizes | {name: common[name] for name in names}
        case "cohere":
            return transformers.CohereConfig, _without(common, "head_dim") | {"logit_scale": 0.25}
    raise ValueError(f"family {family!r} is not a tiny model; known: {', '.join(FAMILIES)}")


FAMILIES = ("qwen3", "qwen3_5", "qwen3_5_moe", "llama", "gemma3", "granite", "gpt2", "cohere")


def tiny_model(
    family: str = "qwen3",
    *,
    seed: int = 0,
    hidden_size: int = 32,
    vocab_size: int = TOKENIZER_VOCAB,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Any:
    """A random model in memory: `AutoModelForCausalLM` of `family`, in eval mode; the global RNG is left alone.

    `hidden_size` is a multiple of 4; a `vocab_size` above TOKENIZER_VOCAB pads the head. `config_overrides` replace
    arguments of the family's config class."""
    config_class, settings = _settings(family, _common(hidden_size, vocab_size))
    config = config_class(**(settings | config_overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norm weights of exactly 1 and biases of exactly 0 would hide that one of them is left out.
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.rand_like(parameter))
    if dtype == torch.float64:
        # The grouped kernel of the experts has no float64.
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def build_tiny_checkpoint(
    directory: Path | str,
    family: str = "qwen3",
    *,
    seed: int = 0,
    hidden_size: int = 32,
    vocab_size: int = TOKENIZER_VOCAB,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write `tiny_model(...)` and the tokenizer into `directory` as `from_pretrained` reads it; returns the path."""
    path = Path(directory)
    model = tiny_model(
        family, seed=seed, hidden_size=hidden_size, vocab_size=vocab_size, dtype=dtype, **config_overrides
    )
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
