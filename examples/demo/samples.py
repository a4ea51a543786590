"""What the demo's models write: greedy continuations of one prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

NEW_TOKENS = 48
PROMPT_CHARACTERS = 60
#: Where the held-out records hold nothing to begin with.
ANY_PROMPT = "The"


def continuations(
    models: Mapping[str, str], *, prompt: str | None, held_out: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """(prompt, name of the model -> prompt and continuation). prompt: None = the beginning of the held-out text."""
    if prompt is None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(next(iter(models.values())))
        prompt = first_words(held_out, tokenizer)
    return prompt, {name: _continue(source, prompt) for name, source in models.items()}


def first_words(files: Sequence[str], tokenizer: Any) -> str:
    """How the first record that is not blank begins, whatever it holds: text, messages or token ids."""
    for line in chain.from_iterable(Path(name).read_text(encoding="utf-8").split("\n") for name in files):
        record = json.loads(line) if line else {}
        ids = record.get("input_ids") or record.get("token_ids")
        if ids:
            text = tokenizer.decode(ids[:NEW_TOKENS], skip_special_tokens=True)
        elif record.get("messages"):
            text = str(record["messages"][0].get("content") or "")
        else:
            text = str(record.get("text") or "")
        if text.strip():
            return str(text[:PROMPT_CHARACTERS])
    return ANY_PROMPT


def _continue(source: str, prompt: str) -> str:
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    encoded = tokenizer(prompt, return_tensors="pt")
    # Not all of it: some tokenizers give segments too, which few causal models take.
    ids = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
