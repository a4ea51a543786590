"""`python -m bench pipeline`: what a step takes in the pipeline, against the slower of teacher and student alone.

A teacher process and this student process run on a core each, with one compute thread, and a real ring between them. In
every round the student first runs alone on states that are there already, then the teacher alone, then both: a perfect
pipeline takes as long as the slower one, and what is more is the ring's. The synthetic teacher takes a fixed part of
the student's time, so that a stall of the student is the ring's too. A real model, balanced, is reported beside it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from bench.outputs import check_outputs
from bench.pipeline_real import RealShape, RealTimes, measure_real
from bench.processes import Cores, TeacherProcess, choose_cores, pinned, sigterm_interrupts, teacher_process
from bench.records import RECORDS_DIR, Check, Record, Setting, Spread, write_record
from bench.report import console, exit_code, figure, print_checks, print_spreads
from bench.synthetic_student import Feeder, PipelineTimes, StepTimes, SyntheticStudent, requests_of, student_alone
from bench.synthetic_teacher import TOKEN_MAP_HASH, synthetic_model
from planner.pace import Stages, pace
from ring.command import flag, parse, run, set_up_logging
from ring.core.errors import ConfigError
from student.config import TrainConfig
from student.loss import Head
from student.parallel.ranks import Ranks
from student.train.teachers import Teachers, connected
from transport import registry

PROG = "bench.pipeline"
RATIO_TARGET, RATIO_LIMIT = 1.10, 1.25
STALL_TARGET_FRAC = 0.05
#: Part of the time that a side was ready to run while other work had its core; above it a note says so.
QUIET_FRAC = 0.03
#: How far the synthetic teacher may be off its part of the student's time before a note says so.
PART_TOLERANCE = 0.05
#: Two models of which a step takes long enough to be worth a pipeline, and not so long that nobody runs the bench.
REAL_SHAPE = RealShape()
_CALIBRATION_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Raises ConfigError on construction: a value out of its range."""

    transport: str = flag("shm", "how states travel: shm, zmq or auto")
    rounds: int = flag(5, "rounds of student alone, teacher alone, pipeline; medians are over them")
    steps: int = flag(24, "steps of the pipeline in a round")
    alone_steps: int = flag(12, "steps of each side alone in a round")
    rows: int = flag(1024, "rows of a microbatch")
    hidden_size: int = flag(4096, "elements of a teacher's state; a slot holds rows x this x 2 bytes")
    vocab_size: int = flag(384, "columns of the heads: sets how long a step takes")
    student_hidden: int = flag(256, "elements of a student's state")
    depth: int = flag(3, "slots of the ring")
    teacher_part: float = flag(0.9, "the synthetic teacher's time as a part of the student's")
    real: bool = flag(True, "also report a small real model")
    real_steps: int = flag(20, "steps of each of its runs")
    out: str = flag(str(RECORDS_DIR), "where the record is written", metavar="DIR")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        names = ("rounds", "steps", "alone_steps", "rows", "hidden_size", "vocab_size", "student_hidden", "depth")
        for name in (*names, "real_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.teacher_part <= 10:
            raise ConfigError(f"--teacher-part must be > 0 and <= 10, got {self.teacher_part}")

    @property
    def slot_bytes(self) -> int:
        return self.rows * self.hidden_size * 2


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round. `teacher_s`: a forward pass alone."""

    student: StepTimes
    teacher_s: float
    pipeline: PipelineTimes

    @property
    def ratio(self) -> float:
        """A step of the pipeline over the slower side alone."""
        return self.pipeline.step.wall_s / max(self.teacher_s, self.student.wall_s)

    @property
    def stall_frac(self) -> float:
        return self.pipeline.step.stall_s / self.pipeline.step.wall_s

    @property
    def cpu_ratio(self) -> float:
        """What a step costs in the pipeline over what it costs alone: the ring's price, whatever the machine does."""
        step = self.pipeline.step
        return (step.thread_s + step.others_s) / (self.student.thread_s + self.student.others_s)

    @property
    def queued_frac(self) -> float:
        """The greatest part of the time that one side's core was taken by work that is not the bench's."""
        step = self.pipeline.step
        # The pump and the transport share the student's core by design.
        fracs = (
            self.student.queued_s / self.student.wall_s,
            (step.queued_s - step.others_s) / step.wall_s,
            self.pipeline.teacher_queued_s / step.wall_s,
        )
        return max(fracs)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a step takes more than 1.25 x the slower side, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(PipelineConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        if config.debug:
            set_up_logging(debug=True)
        with sigterm_interrupts():
            code = bench(config, console())

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def bench(config: PipelineConfig, out: Console) -> int:
    """Measure, print, record; returns the exit code. Raises DisaggKDError."""
    if config.transport not in (registry.AUTO, *registry.names()):
        allowed = ", ".join((registry.AUTO, *registry.names()))
        raise ConfigError(f"--transport {config.transport!r}; allowed between two processes: {allowed}")
    check_outputs(out=config.out)
    cores = choose_cores()
    with tempfile.TemporaryDirectory(prefix="disaggkd-bench-") as name, pinned(cores.student):
        scratch = Path(name)
        rounds, backend = _synthetic(config, cores, scratch, out)
        record = _synthetic_record(config, cores, rounds, backend)
        _print(out, record)
        path = write_record(record, directory=Path(config.out))
        if config.real:
            shape = replace(REAL_SHAPE, num_steps=config.real_steps)
            times = measure_real(
                shape, cores, transport=config.transport, depth=config.depth, scratch=scratch, say=out.print
            )
            real = _real_record(config, shape, times)
            print_checks(out, "a small real model, balanced: teacher.serve and student.train", real.checks)
            write_record(real, directory=Path(config.out))
    out.print(f"record: {path}", highlight=False)
    return exit_code(record.checks)


def _synthetic(config: PipelineConfig, cores: Cores, scratch: Path, out: Console) -> tuple[list[Round], str]:
    """The rounds, and the transport that they went through."""
    step_s = _calibrate(config)
    arguments = [
        *("--rows", str(config.rows), "--hidden-size", str(config.hidden_size)),
        *("--vocab-size", str(config.vocab_size), "--forward-s", str(config.teacher_part * step_s)),
        *("--transport", config.transport),
    ]
    log = scratch / "synthetic-teacher.log"
    with (
        teacher_process("bench.synthetic_teacher", arguments, cpu=cores.teacher, log=log) as teacher,
        connected_ring(config, teacher) as teachers,
    ):
        student = _student(config, Head(weight=teachers.weight))
        requests = requests_of(config.rows, config.vocab_size, num=2 * config.depth)
        feeder = Feeder(teachers.ring, requests, depth=config.depth)
        feeder.check(config.vocab_size, config.hidden_size)
        states = _states(config)
        student_alone(student, states, config.depth)
        rounds = []
        for number in range(1, config.rounds + 1):
            rounds.append(_round(config, student, states, feeder, teacher))
            out.print(_round_line(number, config.rounds, rounds[-1]), highlight=False)
        (backend,) = teachers.ring.stats().backends.values()
    return rounds, backend


def _calibrate(config: PipelineConfig) -> float:
    """CPU seconds of a step of the student, from which the teacher's time follows."""
    head = Head(weight=synthetic_model(config.vocab_size, config.hidden_size).split.weight_VH)
    student, states = _student(config, head), _states(config)
    student_alone(student, states, 2)
    return statistics.median(student_alone(student, states, 1).thread_s for _ in range(_CALIBRATION_STEPS))


def _student(config: PipelineConfig, teacher_head: Head) -> SyntheticStudent:
    return SyntheticStudent(rows=config.rows, hidden_size=config.student_hidden, teacher_head=teacher_head)


def _states(config: PipelineConfig) -> list[torch.Tensor]:
    """As many as the ring has, so that a step alone finds no more of them in the cache than one of the pipeline."""
    shape = (config.rows, config.hidden_size)
    return [torch.randn(shape).to(torch.bfloat16) for _ in range(config.depth)]


@contextmanager
def connected_ring(config: PipelineConfig, teacher: TeacherProcess) -> Iterator[Teachers]:
    """The trainer's own connection, with slots for --rows and as many as --depth says."""
    train = TrainConfig(
        teacher=(teacher.endpoint,), transport=config.transport, ring_depth=config.depth, run_name="bench"
    )
    with connected(
        train,
        token_map_hash=TOKEN_MAP_HASH,
        vocab_size=config.vocab_size,
        max_rows=config.rows,
        max_tokens=config.rows,
        max_document_tokens=config.rows,
        fingerprint=None,
        ranks=Ranks.alone(torch.device("cpu")),
    ) as teachers:
        yield teachers


def _round(
    config: PipelineConfig,
    student: SyntheticStudent,
    states: Sequence[torch.Tensor],
    feeder: Feeder,
    teacher: TeacherProcess,
) -> Round:
    alone = student_alone(student, states, config.alone_steps)
    teacher_s = feeder.teacher_alone(config.alone_steps)
    pipeline = feeder.pipeline(student, config.steps, teacher=teacher)
    return Round(student=alone, teacher_s=teacher_s, pipeline=pipeline)


def _round_line(number: int, num_rounds: int, done: Round) -> str:
    return (
        f"round {number}/{num_rounds}: student alone {figure(done.student.wall_s, 's')}, "
        f"teacher alone {figure(done.teacher_s, 's')}, "
        f"step {figure(done.pipeline.step.wall_s, 's')} = {done.ratio:.3f} x the slower, "
        f"stall {figure(done.stall_frac, 'frac')}"
    )


def _synthetic_record(config: PipelineConfig, cores: Cores, rounds: Sequence[Round], backend: str) -> Record:
    ratio = Spread.of([done.ratio for done in rounds])
    stall = Spread.of([done.stall_frac for done in rounds])
    part = Spread.of([done.teacher_s / done.student.wall_s for done in rounds])
    cpu = Spread.of([done.cpu_ratio for done in rounds])
    queued = Spread.of([done.queued_frac for done in rounds])
    steps = [done.pipeline.step for done in rounds]
    measured = {
        "step_s": Spread.of([step.wall_s for step in steps]),
        "student_alone_s": Spread.of([done.student.wall_s for done in rounds]),
        "student_alone_cpu_s": Spread.of([done.student.thread_s for done in rounds]),
        "teacher_alone_s": Spread.of([done.teacher_s for done in rounds]),
        "step_over_slower": ratio,
        "teacher_over_student": part,
        "student_stall_frac": stall,
        "step_thread_cpu_s": Spread.of([step.thread_s for step in steps]),
        "step_other_threads_cpu_s": Spread.of([step.others_s for step in steps]),
        "step_ring_calls_s": Spread.of([step.ring_s for step in steps]),
        "teacher_forward_s": Spread.of([done.pipeline.forward_s for done in rounds]),
        "teacher_cpu_s": Spread.of([done.pipeline.teacher_cpu_s for done in rounds]),
        "teacher_idle_frac": Spread.of([done.pipeline.teacher_idle_s / done.pipeline.step.wall_s for done in rounds]),
        "queued_frac": queued,
        "step_cpu_over_alone": cpu,
    }
    checks = (
        Check(
            name="step over the slower of teacher and student alone",
            measured=ratio.median,
            target=RATIO_TARGET,
            limit=RATIO_LIMIT,
        ),
        Check(name="student stall", measured=stall.median, unit="frac", target=STALL_TARGET_FRAC),
        Check(name="CPU of a step, all threads, over the student alone", measured=cpu.median),
        Check(name="teacher alone over student alone", measured=part.median),
    )
    settings: dict[str, Setting] = {name: value for name, value in asdict(config).items() if name != "out"}
    return Record(
        bench="pipeline",
        case="synthetic",
        settings=settings | {"transport_used": backend, "shared_core": cores.shared_core},
        measured=measured,
        bytes_moved=sum(done.pipeline.num_bytes for done in rounds),
        predicted={"step_s": _predicted_s(measured["student_alone_s"], measured["teacher_alone_s"], config.depth)},
        checks=checks,
        notes=tuple(_notes(config, cores, part=part.median, queued_frac=queued.median)),
    )


def _predicted_s(student: Spread, teacher: Spread, depth: int) -> float:
    """What the planner makes of both sides' own times. Within one machine a fill takes next to nothing."""
    return pace(Stages(teacher_s=teacher.median, link_s=0.0, student_s=student.median, depth=depth)).step_s


def _notes(config: PipelineConfig, cores: Cores, *, part: float, queued_frac: float) -> Iterator[str]:
    """What makes these figures less than they claim to be."""
    if cores.shared_core:
        yield "both sides ran on hardware threads of one core: part of the excess is the core's, not the ring's"
    if queued_frac > QUIET_FRAC:
        yield (
            f"not quiet: other work had a side's core for {queued_frac:.0%} of the time; the times are noise: run it "
            f"again on an idle machine (the CPU figures hold)"
        )
    if abs(part - config.teacher_part) > PART_TOLERANCE:
        yield f"the teacher took {part:.2f} x the student's time, {config.teacher_part:.2f} was meant"


def _real_record(config: PipelineConfig, shape: RealShape, times: RealTimes) -> Record:
    return Record(
        bench="pipeline",
        case="real",
        settings={**asdict(shape), "transport": config.transport, "depth": config.depth, "layers": times.num_layers},
        measured={"step_s": times.step, "student_alone_s": times.student, "teacher_alone_s": times.teacher},
        bytes_moved=times.num_bytes,
        predicted={"step_s": _predicted_s(times.student, times.teacher, config.depth)},
        checks=(
            Check(name="step over the slower of teacher and student alone", measured=times.ratio),
            Check(name="student stall", measured=times.stall_frac, unit="frac"),
            Check(name="step", measured=times.step.median, unit="s"),
            Check(name="student alone", measured=times.student.median, unit="s"),
            Check(name="teacher alone", measured=times.teacher.median, unit="s"),
        ),
    )


_SHOWN = {
    "step_s": "step of the pipeline",
    "student_alone_s": "student alone",
    "teacher_alone_s": "teacher alone, a forward pass",
    "student_alone_cpu_s": "student alone, CPU of its thread",
    "step_thread_cpu_s": "step, CPU of the training thread",
    "step_other_threads_cpu_s": "step, CPU of pump and transport",
    "step_ring_calls_s": "step, in calls of the ring but for the stall",
    "teacher_forward_s": "teacher's forward pass in the pipeline",
    "teacher_cpu_s": "teacher's CPU for a request, all threads",
    "teacher_idle_frac": "teacher idle",
}


def _print(out: Console, record: Record) -> None:
    transport = record.settings["transport_used"]
    rows = [(text, "frac" if name.endswith("_frac") else "s", record.measured[name]) for name, text in _SHOWN.items()]
    print_spreads(out, f"synthetic teacher over {transport}, a core each; medians over rounds", rows)
    print_checks(out, "pipeline", record.checks)
    for note in record.notes:
        out.print(f"note: {note}", style="yellow", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
