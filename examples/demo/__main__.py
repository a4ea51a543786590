"""`make demo`: train a small teacher, serve it, distil a student from it over a transport, and draw what came of it.

With --teacher, --student and --data the same is done with your own models and text. A second run reuses the teacher.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.claimed import claim, claim_out, is_made, remove, renew
from bench.corpus import MAX_POSITIONS, build_corpus, write_model_config
from bench.stages import read_lines, teacher, train
from examples.demo.memory import HIDDEN_SIZE, NUM_ROWS, VOCAB_SIZE, measure
from examples.demo.report import Outcome, draw, summarize
from examples.demo.samples import continuations
from examples.demo.split import split_held_out
from ring.command import flag, parse, run
from ring.core.errors import ConfigError
from student.config import TrainConfig
from transport.registry import load

PROG = "demo"
#: Calibrated on two CPU cores: a longer-trained teacher is a better one, but minutes are what a demo may take.
TEACHER_SHAPE = {"hidden_size": 256, "num_layers": 4}
STUDENT_SHAPE = {"hidden_size": 128, "num_layers": 2}
TEACHER_STEPS, TEACHER_LR = 400, 1.5e-3
#: From random weights, and for models that know something already.
STUDENT_LR, OWN_STUDENT_LR = 1.5e-3, 1e-4
SEQUENCE_TOKENS, BATCH_SIZE = 256, 8
#: For one pass of a large teacher on CPUs that have other things to do as well.
PATIENCE_S = 600
#: Between two processes of one machine.
TRANSPORTS = ("shm", "zmq", "ucx")
PROMPT = "def read_config(path):\n    "
#: What is written below --out.
EMBEDDED_DIRECTORIES = ("corpus", "student", "teacher-shape", "teacher-run", "teacher.copy", "teacher")
EMBEDDED_FILES = ("teacher-recipe.json", "teacher-run.log")
OWN_DIRECTORIES = ("own-data",)
STUDENT_DIRECTORIES = ("kd", "ce")
FILES = (
    *("kd.log", "ce.log", "teacher-serve.log", "teacher-serve.endpoint"),
    *("report.png", "report.json", "summary.txt"),
)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Raises ConfigError on construction: some of teacher, student and data are given, but not all; what the trainer
    refuses; a transport that can't run here."""

    teacher: str | None = flag(None, "your own teacher instead of the demo's", metavar="DIR|ID")
    student: str | None = flag(None, "your own student instead of the demo's", metavar="DIR|ID")
    data: tuple[str, ...] = flag((), "your own text instead: JSONL, Parquet or text files", metavar="FILE")
    steps: int = flag(256, "optimizer steps of each student")
    seed: int = flag(0, "data order and random weights of the students")
    max_length: int = flag(SEQUENCE_TOKENS, "tokens of a sequence")
    batch_size: int = flag(BATCH_SIZE, "sequences in a step")
    lr: float | None = flag(
        None, f"peak learning rate of the students; default: {STUDENT_LR}, with your own {OWN_STUDENT_LR}"
    )
    transport: str = flag("shm", "how the teacher's states travel: shm, zmq or ucx")
    out: str = flag("runs/demo", "where everything is written", metavar="DIR")
    fresh: bool = flag(False, "train the demo's teacher anew")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        given = [bool(self.teacher), bool(self.student), bool(self.data)]
        if any(given) and not all(given):
            raise ConfigError(
                "give TEACHER=, STUDENT= and DATA= together, or none of them: they must fit each other; "
                f"got TEACHER={self.teacher}, STUDENT={self.student}, DATA={' '.join(self.data) or None}"
            )
        if self.steps < 1:
            raise ConfigError(f"--steps must be >= 1, got {self.steps}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"--transport {self.transport}: no transport of the demo; allowed: {', '.join(TRANSPORTS)}"
            )
        load(self.transport)
        if self.teacher is None and self.max_length > MAX_POSITIONS:
            raise ConfigError(
                f"--max-length {self.max_length}: the demo's models have positions for {MAX_POSITIONS} tokens"
            )
        # What the trainers would refuse is refused before anything is made for them.
        nothing = Material(teacher="-", student="-", train=("-",), held_out=("-",), from_config=True)
        parse(TrainConfig, student_arguments(self, nothing, Path(self.out)), prog=PROG, description="")

    @property
    def student_lr(self) -> float:
        """The learning rate that was asked for, or the one that fits the students."""
        return self.lr if self.lr is not None else (OWN_STUDENT_LR if self.student else STUDENT_LR)


@dataclass(frozen=True)
class Material:
    """What the students are made from. `from_config`: they start from random weights."""

    teacher: str
    student: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    from_config: bool


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                # An exception instead of an end on the spot, so that no process of the demo is left behind.
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
        demo(parse(DemoConfig, arguments, prog=PROG, description=__doc__ or ""))

    return run(command, prog=PROG, debug="--debug" in arguments)


def demo(config: DemoConfig) -> None:
    """Raises ConfigError: something in --out that the demo did not make. Raises StageFailed: a process of the demo
    failed; its log is named."""
    started_s = time.monotonic()
    console = Console(markup=False, emoji=False)
    root = Path(config.out)
    claim_out(
        root,
        directories=(*STUDENT_DIRECTORIES, *(OWN_DIRECTORIES if config.teacher else EMBEDDED_DIRECTORIES)),
        files=(*FILES, *(() if config.teacher else EMBEDDED_FILES)),
    )
    with stage_progress(console) as progress:
        material = _own(config, root) if config.teacher else embedded_material(config, root, progress)
        kd_dir, ce_dir = root / "kd", root / "ce"
        for directory in (kd_dir, ce_dir):
            renew(directory)
        common = student_arguments(config, material, root)
        _distil(config, material, common, kd_dir, progress)
        train(
            [*common, "--kd-weight", "0", "--ce-weight", "1"],
            out=ce_dir,
            num_steps=config.steps,
            title="the same student on labels alone",
            progress=progress,
        )
        task = progress.add_task("memory of the loss, generated text", total=3)
        full_bytes = measure("full")
        progress.advance(task)
        fused_bytes = measure("fused")
        progress.advance(task)
        prompt = PROMPT if not config.teacher else None
        prompt, samples = continuations(
            {"teacher": material.teacher, "distilled": str(kd_dir / "model"), "labels only": str(ce_dir / "model")},
            prompt=prompt,
            held_out=material.held_out,
        )
        progress.advance(task)
    outcome = Outcome(
        kd=read_lines(kd_dir / "metrics.jsonl"),
        ce=read_lines(ce_dir / "metrics.jsonl"),
        kd_eval=read_lines(kd_dir / "eval.jsonl"),
        ce_eval=read_lines(ce_dir / "eval.jsonl"),
        teacher_eval=_teacher_eval(root) if not config.teacher else None,
        full_peak_bytes=full_bytes,
        fused_peak_bytes=fused_bytes,
        loss_shape=f"{NUM_ROWS} rows x {VOCAB_SIZE:,} tokens, hidden {HIDDEN_SIZE}",
        sample_prompt=prompt,
        samples=samples,
        wall_s=time.monotonic() - started_s,
    )
    _present(outcome, root, console)


def _distil(config: DemoConfig, material: Material, common: Sequence[str], out: Path, progress: Progress) -> None:
    """A student of the teacher's service, which runs meanwhile."""
    serving = ("--model", material.teacher, "--listen", "tcp://127.0.0.1:*", "--threads", "1")
    with teacher([*serving, "--transport", config.transport], root=out.parent) as service:
        arguments = (
            *("--teacher", service.endpoint, "--transport", config.transport, "--threads", "1"),
            *("--kd-weight", "0.9", "--ce-weight", "0.1"),
            # A teacher that dies is noticed all the same, within seconds.
            *("--request-timeout", str(PATIENCE_S)),
        )
        train(
            [*common, *arguments],
            out=out,
            num_steps=config.steps,
            title=f"student, distilled over {config.transport}",
            progress=progress,
        )


def embedded_material(config: DemoConfig, root: Path, progress: Progress) -> Material:
    """The demo's own corpus, teacher and student; the teacher is trained once. EMBEDDED_DIRECTORIES and EMBEDDED_FILES
    of `root` are ours."""
    task = progress.add_task("corpus: the Python standard library's source", total=1)
    claim(root / "corpus")
    corpus = build_corpus(root / "corpus")
    progress.update(task, completed=1)
    student_dir, teacher_dir, run_dir = root / "student", root / "teacher", root / "teacher-run"
    claim(student_dir)
    write_model_config(student_dir, corpus, **STUDENT_SHAPE)
    recipe = {"shape": TEACHER_SHAPE, "steps": TEACHER_STEPS, "lr": TEACHER_LR, "tokens": SEQUENCE_TOKENS}
    marker = root / "teacher-recipe.json"
    same = marker.exists() and json.loads(marker.read_text()) == recipe
    if config.fresh or not same:
        for directory in (teacher_dir, run_dir):
            remove(directory)
        marker.write_text(json.dumps(recipe))
    if not is_made(teacher_dir):
        shape_dir, copy_dir = root / "teacher-shape", root / "teacher.copy"
        claim(shape_dir)
        claim(run_dir)
        write_model_config(shape_dir, corpus, **TEACHER_SHAPE)
        arguments = [
            *("--student", str(shape_dir), "--from-config", "--kd-weight", "0", "--ce-weight", "1"),
            *("--data", str(corpus.train), "--eval-data", str(corpus.held_out), "--eval-samples", "128"),
            *("--max-length", str(SEQUENCE_TOKENS), "--batch-size", str(BATCH_SIZE), "--steps", str(TEACHER_STEPS)),
            *("--lr", str(TEACHER_LR), "--warmup-steps", "20", "--precision", "bf16"),
            *("--checkpoint-every", "100", "--cache-dir", str(root / "cache")),
        ]
        train(arguments, out=run_dir, num_steps=TEACHER_STEPS, title="teacher, trained from scratch", progress=progress)
        renew(copy_dir)
        shutil.copytree(run_dir / "model", copy_dir, dirs_exist_ok=True)
        copy_dir.rename(teacher_dir)
    return Material(
        teacher=str(teacher_dir),
        student=str(student_dir),
        train=(str(corpus.student),),
        held_out=(str(corpus.held_out),),
        from_config=True,
    )


def _own(config: DemoConfig, root: Path) -> Material:
    """The user's models and text; part of the text is held out."""
    assert config.teacher is not None
    assert config.student is not None
    claim(root / "own-data")
    train_files, held_out = split_held_out(config.data, root / "own-data")
    return Material(
        teacher=config.teacher, student=config.student, train=train_files, held_out=held_out, from_config=False
    )


def student_arguments(config: DemoConfig, material: Material, root: Path) -> list[str]:
    return [
        *("--student", material.student, *(["--from-config"] if material.from_config else [])),
        *("--data", *material.train, "--eval-data", *material.held_out, "--eval-samples", "128"),
        *("--max-length", str(config.max_length), "--batch-size", str(config.batch_size)),
        *(
            "--steps",
            str(config.steps),
            "--lr",
            str(config.student_lr),
            "--warmup-steps",
            str(min(20, config.steps // 8)),
        ),
        *("--eval-every", str(max(1, config.steps // 8)), "--seed", str(config.seed)),
        *("--cache-dir", str(root / "cache")),
    ]


def _teacher_eval(root: Path) -> float | None:
    lines = read_lines(root / "teacher-run" / "eval.jsonl")
    return lines[-1]["eval_loss"] if lines else None


def stage_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<46}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _present(outcome: Outcome, root: Path, console: Console) -> None:
    picture = root / "report.png"
    draw(outcome, picture)
    lines = summarize(outcome)
    text = "\n".join(
        [
            *lines,
            "",
            f"Generated text, greedy, after {outcome.sample_prompt!r}:",
            *(f"--- {name}\n{sample}" for name, sample in outcome.samples.items()),
        ]
    )
    (root / "summary.txt").write_text(text + "\n", encoding="utf-8")
    facts = {"gain_nats": outcome.gain_nats, "kd": outcome.kd_eval, "ce": outcome.ce_eval}
    (root / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
    # What a model writes may be no text of this terminal's encoding.
    text = text.encode(console.encoding, errors="replace").decode(console.encoding)
    console.print()
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    files = f"Picture: {picture}   Models: {root}/kd/model, {root}/ce/model   This text: {root}/summary.txt"
    console.print(f"\n{files}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
