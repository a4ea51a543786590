"""Real text that every machine with Python has, the standard library's source, and models shaped for it.

The demo and the report train on it.

Files are held out by a hash of their path, so that no held-out file is ever trained on, on any machine.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import ByteLevelBPETokenizer

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
#: Tokens of the longest sequence that the models made here have positions for.
MAX_POSITIONS = 1024
#: One file in so many is held out.
HELD_OUT_OF = 20
#: The student sees little text, as one does who distils for a narrow task: about 512 sequences of 256 tokens.
STUDENT_CHARACTERS = 430_000
EVAL_CHARACTERS = 160_000
#: Left out: tests with their odd bytes, generated tables that read like no program, and packages of others.
_LEFT_OUT = {
    *("test", "tests", "encodings", "pydoc_data", "idlelib", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages", "__pycache__"),
}


@dataclass(frozen=True)
class Corpus:
    """Where the text is. `train`: what the teacher reads; `student`: a small part of it; `held_out`: neither."""

    root: Path

    @property
    def train(self) -> Path:
        return self.root / "teacher.jsonl"

    @property
    def student(self) -> Path:
        return self.root / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.root / "held-out.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def complete(self) -> Path:
        return self.root / "complete.json"


def build_corpus(root: Path, *, vocab_size: int = VOCAB_SIZE) -> Corpus:
    """The corpus in `root`, made if it is not there: text files and a byte-level BPE tokenizer trained on them.

    vocab_size: tokens of the tokenizer; a corpus that is there already keeps its own."""
    corpus = Corpus(root)
    if corpus.complete.exists():
        return corpus
    root.mkdir(parents=True, exist_ok=True)
    train: list[str] = []
    held_out: list[str] = []
    for name, text in _standard_library():
        (held_out if int(hashlib.sha1(name.encode()).hexdigest(), 16) % HELD_OUT_OF == 0 else train).append(text)
    # Spread over the library rather than its first letters: every so-many-th file.
    _write(corpus.train, train)
    _write(corpus.student, _spread(train, STUDENT_CHARACTERS))
    _write(corpus.held_out, _spread(held_out, EVAL_CHARACTERS))
    _train_tokenizer(corpus, train, vocab_size)
    corpus.complete.write_text(json.dumps({"files": len(train) + len(held_out), "held_out": len(held_out)}))
    return corpus


def write_model_config(directory: Path, corpus: Corpus, *, hidden_size: int, num_layers: int) -> None:
    """A Qwen3-class model's config.json and the corpus's tokenizer: all that training from random weights needs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.eos_token_id = config.bos_token_id = tokenizer.eos_token_id
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _standard_library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT.isdisjoint(name.split("/")[:-1]):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield name, text


def _spread(texts: list[str], characters: int) -> list[str]:
    stride = max(1, sum(map(len, texts)) // characters)
    return texts[::stride]


def _write(path: Path, texts: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")


def _train_tokenizer(corpus: Corpus, texts: list[str], vocab_size: int) -> None:
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast_tokenizer(tokenizer_object=trainer._tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    tokenizer.save_pretrained(corpus.tokenizer)
