"""What the demo's models write: greedy continuations of one prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

NEW_TOKENS = 48
PROMPT_CHARACTERS = 60


def continuations(
    models: Mapping[str, str], *, prompt: str | None, held_out: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """(prompt, name of the model -> prompt and continuation). prompt: None = the beginning of the held-out text."""
    if prompt is None:
        first = json.loads(Path(held_out[0]).read_text(encoding="utf-8").split("\n", 1)[0])
        prompt = str(first["text"])[:PROMPT_CHARACTERS]
    return prompt, {name: _continue(source, prompt) for name, source in models.items()}


def _continue(source: str, prompt: str) -> str:
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
