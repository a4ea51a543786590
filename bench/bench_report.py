"""`python -m bench report`: what the project claims, reproduced on this machine by real processes, as one page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.claimed import claim, claim_out
from bench.claims import charts, layouts, memory, models, page, pair, wires
from bench.claims.loss_part import LossSizes
from bench.claims.pair import Pair, own_pair, random_pair
from bench.claims.runs import Run
from bench.claims.section import Section
from bench.corpus import build_corpus
from bench.processes import sigterm_interrupts
from bench.records import environment
from ring.command import flag, parse, run, set_up_logging
from ring.core.errors import ConfigError
from ring.devices import find_device

PROG = "bench.report"
Made = TypeVar("Made")
#: The pair of the claims about memory: a student whose tensors are much more than what a process takes anyhow, and a
#: teacher too large to sit beside it under the cap.
LARGE_TEACHER = {"hidden_size": 1024, "num_layers": 8}
LARGE_STUDENT = {"hidden_size": 512, "num_layers": 4}
MEMORY_STEPS, MEMORY_BATCH = 8, 4
#: What is written below --out, beside what the pairs are.
RUN_DIRECTORIES = ("curves", "pace", "memory", "transport")
FILES = ("report.html", "report.json", "summary.md", "overview.png")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Raises ConfigError on construction: a value out of its range, or a pair that is not whole."""

    teacher: str | None = flag(None, "your own teacher instead of the report's", metavar="DIR|ID")
    student: str | None = flag(None, "your own student instead of the report's", metavar="DIR|ID")
    data: tuple[str, ...] = flag((), "your own text instead: JSONL, Parquet or text files", metavar="FILE")
    device: str = flag("cpu", "where both models run: cpu, cuda, cuda:N")
    steps: int = flag(48, "optimizer steps of each run")
    teacher_steps: int = flag(100, "optimizer steps that the report's teacher is trained for, once")
    sequence_tokens: int = flag(256, "tokens of a sequence")
    batch_size: int = flag(8, "sequences of a microbatch")
    ring_depth: int = flag(3, "slots of the ring")
    out: str = flag("runs/report", "where everything is written", metavar="DIR")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        given = [bool(self.teacher), bool(self.student), bool(self.data)]
        if any(given) and not all(given):
            raise ConfigError(
                "give --teacher, --student and --data together, or none of them: they must fit each other; got "
                f"--teacher {self.teacher}, --student {self.student}, --data {' '.join(self.data) or None}"
            )
        for name, least in (
            ("steps", 8),
            ("teacher_steps", 1),
            ("sequence_tokens", 2),
            ("batch_size", 1),
            ("ring_depth", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(self, name)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a claim did not hold, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(ReportConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        if config.debug:
            set_up_logging(debug=True)
        out = Console(markup=False, emoji=False)
        with sigterm_interrupts():
            code = report(config, out, shell=" ".join(["python -m bench report", *arguments]))

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def report(config: ReportConfig, console: Console, *, shell: str) -> int:
    """Measure, write, say what was found; returns the exit code. Raises DisaggKDError."""
    started_s = time.monotonic()
    # Before anything is made: a device, a package or a model that is not there would be noticed after minutes.
    find_device(config.device, flag="--device")
    charts.require()
    if config.teacher is not None:
        _check_models(config)
    root = Path(config.out)
    _claim(config, root)
    with _progress(console) as progress:
        sections = list(_sections(config, root, progress))
    path = page.write(
        sections,
        out=root,
        command=shell,
        about=_about(config),
        wall_s=time.monotonic() - started_s,
        environment=environment(),
    )
    for number, section in enumerate(sections, start=1):
        console.print(
            f"{number}. {section.title} ({section.verdict}): {section.finding}", highlight=False, soft_wrap=True
        )
    console.print(f"page: {path}", highlight=False)
    return int(any(section.verdict == "fails" for section in sections))


def _check_models(config: ReportConfig) -> None:
    """Raises ConfigError: a model of the user's that no figure can be predicted for."""
    own = _pair(config, Path(config.out))
    memory.predicted(own, _shape(config))
    for flag_name, model in (("--teacher", own.teacher), ("--student", own.student)):
        try:
            models.Width.of(model)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{flag_name} {model}: {str(error).splitlines()[0]}") from error


def _claim(config: ReportConfig, root: Path) -> None:
    """Raises ConfigError: something in --out that no report made; nothing changed."""
    made: Sequence[str] = ()
    if config.teacher is None:
        made = (*pair.DIRECTORIES, *pair.pair_directories(LARGE_TEACHER, LARGE_STUDENT))
    claim_out(root, directories=(*RUN_DIRECTORIES, *made), files=(*FILES, *(pair.FILES if made else ())))
    for name in RUN_DIRECTORIES:
        claim(root / name)


def _shape(config: ReportConfig) -> layouts.Shape:
    return layouts.Shape(
        steps=config.steps,
        sequence_tokens=config.sequence_tokens,
        batch_size=config.batch_size,
        ring_depth=config.ring_depth,
        device=config.device,
    )


def _sections(config: ReportConfig, root: Path, progress: Progress) -> Iterator[Section]:
    shape = _shape(config)
    small = _one(progress, "models and text", lambda: _pair(config, root))
    curves = _all(progress, "the same loss", 4, layouts.curves(small, shape, root))
    paced = _all(progress, "the pace", 4, layouts.paced(small, shape, root))
    alone = _one(
        progress, "the loss by itself", lambda: layouts.losses_alone(_loss_sizes(small, shape), device=config.device)
    )
    large, few = _large_pair(config, root, small), replace(shape, steps=MEMORY_STEPS, batch_size=MEMORY_BATCH)
    held = memory.held(
        large, few, _all(progress, "memory, free and capped", 6, memory.runs(large, few, root / "memory"))
    )
    yield layouts.same_loss(curves)
    yield layouts.pace(paced, alone)
    yield layouts.fused_alone(paced)
    yield memory.trainer_process(held)
    yield memory.out_of_memory(held)
    records = _one(progress, "the transports", lambda: wires.measure(root))
    yield models.forms(paced, curves, held, shape, models.Width.of(small.teacher))
    yield wires.transports(records)


def _pair(config: ReportConfig, root: Path) -> Pair:
    if config.teacher is None or config.student is None:
        return own_pair(
            root,
            steps=config.teacher_steps,
            sequence_tokens=config.sequence_tokens,
            batch_size=config.batch_size,
            device=config.device,
        )
    return Pair(teacher=config.teacher, student=config.student, data=config.data, held_out=(), from_config=False)


def _large_pair(config: ReportConfig, root: Path, small: Pair) -> Pair:
    if config.teacher is not None:
        return small
    corpus = build_corpus(root / "corpus")
    return random_pair(root, corpus, teacher=LARGE_TEACHER, student=LARGE_STUDENT)


def _loss_sizes(small: Pair, shape: layouts.Shape) -> LossSizes:
    student, teacher = models.Width.of(small.student), models.Width.of(small.teacher)
    return LossSizes(
        rows=shape.batch_size * (shape.sequence_tokens - 1),
        vocab_size=student.vocab_size,
        student_hidden=student.hidden_size,
        teacher_hidden=teacher.hidden_size,
    )


def _about(config: ReportConfig) -> str:
    if config.teacher is not None:
        return f"Teacher {config.teacher}, student {config.student}."
    return (
        "A small teacher and a smaller student, trained on the Python standard library's source: what is said here is "
        "about layouts, not about models."
    )


def _one(progress: Progress, title: str, work: Callable[[], Made]) -> Made:
    task = progress.add_task(title, total=1)
    found = work()
    progress.update(task, completed=1)
    return found


def _all(progress: Progress, title: str, total: int, runs: Iterator[Run]) -> dict[str, Run]:
    task = progress.add_task(title, total=total)
    found = {}
    for done in runs:
        found[done.name] = done
        progress.advance(task)
    return found


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<40}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


if __name__ == "__main__":
    sys.exit(main())
