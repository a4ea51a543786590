"""`make demo-cluster`: the student of the demo on two ranks (FSDP) that ask two replicas, and what came of it.

The corpus and the teacher are those of `make demo`, and are made here if it has not run yet. On one machine nothing
gets faster by this: it shows that the parts of a cluster work together.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console

from bench.claimed import claim, claim_out, renew
from bench.stages import read_lines, teacher, train
from examples.demo.__main__ import (
    EMBEDDED_DIRECTORIES,
    EMBEDDED_FILES,
    DemoConfig,
    embedded_material,
    stage_progress,
    student_arguments,
)
from examples.demo.report import BLUE, GREY, draw_time
from ring.command import flag, parse, run
from ring.core.errors import ConfigError

PROG = "demo-cluster"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Raises ConfigError on construction: a count below 1, or a batch or heads that the ranks can't
    share."""

    ranks: int = flag(2, "trainer processes")
    replicas: int = flag(2, "teacher processes")
    vocab_parallel: int = flag(1, "ranks that share one pair of heads")
    steps: int = flag(96, "optimizer steps")
    batch_size: int = flag(8, "sequences in a step, of all ranks together")
    out: str = flag("runs/demo", "where everything is written", metavar="DIR")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "vocab_parallel", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.batch_size < 1 or self.batch_size % self.ranks:
            raise ConfigError(f"--batch-size {self.batch_size}: allowed: a multiple of the {self.ranks} ranks")
        if self.ranks % self.vocab_parallel:
            raise ConfigError(f"--vocab-parallel {self.vocab_parallel}: allowed: a divisor of the {self.ranks} ranks")
        _ = self.of_a_rank

    @property
    def of_a_rank(self) -> DemoConfig:
        """The demo's settings with one rank's part of the batch. Raises ConfigError: the trainer refuses them."""
        return DemoConfig(steps=self.steps, batch_size=self.batch_size // self.ranks, out=self.out)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                # An exception instead of an end on the spot, so that no process of the demo is left behind.
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
        demo(parse(ClusterConfig, arguments, prog=PROG, description=__doc__ or ""))

    return run(command, prog=PROG, debug="--debug" in arguments)


def demo(config: ClusterConfig) -> None:
    """Raises ConfigError: something in --out that no demo made. Raises StageFailed: a process of the demo failed; its
    log is named."""
    started_s = time.monotonic()
    console, root = Console(markup=False, emoji=False), Path(config.out)
    out = root / "cluster"
    replica_dirs = [root / f"replica-{number}" for number in range(config.replicas)]
    claim_out(
        root,
        directories=("cluster", *EMBEDDED_DIRECTORIES, *(directory.name for directory in replica_dirs)),
        files=("cluster.log", "cluster.png", *EMBEDDED_FILES),
    )
    renew(out)
    with stage_progress(console) as progress, ExitStack() as stack:
        material = embedded_material(config.of_a_rank, root, progress)
        serving = ["--model", material.teacher, "--listen", "tcp://127.0.0.1:*", "--threads", "1"]
        replicas = []
        for directory in replica_dirs:
            claim(directory)
            replicas.append(stack.enter_context(teacher(serving, root=directory)).endpoint)
        arguments = [
            *student_arguments(config.of_a_rank, material, root),
            *("--teacher", *replicas, "--kd-weight", "0.9", "--ce-weight", "0.1", "--threads", "1"),
            *("--fsdp", "--vocab-parallel", str(config.vocab_parallel)),
        ]
        title = f"student on {config.ranks} ranks, {config.replicas} replicas"
        train(arguments, out=out, num_steps=config.steps, title=title, progress=progress, ranks=config.ranks)
    summary = json.loads((out / "summary.json").read_text())
    console.print()
    for line in report(config, summary, read_lines(out / "metrics.jsonl"), wall_s=time.monotonic() - started_s):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    picture = root / "cluster.png"
    draw(config, read_lines(out / "metrics.jsonl"), read_lines(out / "eval.jsonl"), picture)
    files = f"\nPicture: {picture}   Model: {out}/model   Metrics: {out}/metrics.jsonl"
    console.print(files, markup=False, highlight=False, soft_wrap=True)


def draw(config: ClusterConfig, steps: list[dict[str, float]], evaluations: list[dict[str, float]], path: Path) -> None:
    """Held-out loss against steps, and where the time of a step goes."""
    # What metrics hold of the teachers is the sum over all replicas; a line of the picture is one of them.
    of_one = [
        {**step, **{name: step[name] / config.replicas for name in ("teacher_s", "teacher_stall_s")}} for step in steps
    ]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (loss_axis, time_axis) = plt.subplots(1, 2, figsize=(11, 4.4))
        loss_axis.plot([step["step"] for step in steps], [step["lm_loss"] for step in steps], color=GREY, lw=0.8)
        loss_axis.plot([e["step"] for e in evaluations], [e["eval_loss"] for e in evaluations], "o-", color=BLUE, ms=4)
        last = evaluations[-1]
        at = (last["step"], last["eval_loss"])
        loss_axis.annotate(f"{last['eval_loss']:.2f}", at, textcoords="offset points", xytext=(-12, -16))
        loss_axis.set(title="Loss on labels: held out (blue), in training (grey)", ylabel="nats per token")
        loss_axis.set_xlabel("optimizer step")
        draw_time(time_axis, of_one)
        time_axis.set_title("Where a step's time goes: one rank, one replica")
        figure.suptitle(f"One student on {config.ranks} ranks, taught by {config.replicas} replicas", fontsize=12)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        plt.close(figure)


def report(
    config: ClusterConfig, summary: dict[str, Any], steps: list[dict[str, float]], *, wall_s: float
) -> list[str]:
    """The summary for a person."""
    trained_s = sum(step["step_s"] for step in steps)
    stall_frac = sum(step["student_stall_s"] for step in steps) / max(trained_s, 1e-9)
    tokens = sum(step["tokens_per_s"] * step["step_s"] for step in steps)
    transports = ", ".join(f"{name} over {backend}" for name, backend in sorted(summary["transports"].items()))
    groups = f", heads cut over {config.vocab_parallel}" if config.vocab_parallel > 1 else ""
    return [
        f"{summary['ending']}: {summary['steps']} of {summary['expected_steps']} steps, {summary['samples_trained']} "
        f"samples, in {wall_s:.0f} s",
        f"ranks     {summary['ranks']}, FSDP{groups}; held-out loss {summary['eval_loss_first']:.3f} -> "
        f"{summary['eval_loss_last']:.3f} nats/token",
        f"replicas  {transports}",
        f"pace      {tokens / max(trained_s, 1e-9):,.0f} tokens/s; the ranks waited for a teacher {stall_frac:.0%} of "
        f"the time",
        f"traffic   {summary['bytes_received'] / 2**20:.1f} MiB of states and heads, {summary['retries']} retries, "
        f"{summary['drops']} drops",
    ]


if __name__ == "__main__":
    sys.exit(main())
