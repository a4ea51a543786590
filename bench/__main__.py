"""`python -m bench`: measures transports, the ring, the pipeline and the loss, and holds them against their targets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from bench.cli import Entry, dispatch
from bench.tethered import tethered

PROG = "bench"
BENCHES = {
    "transport": Entry("bench.bench_transport", "bytes a second of each transport, against memcpy and a raw socket"),
    "pipeline": Entry("bench.bench_pipeline", "a step against the slower of teacher and student alone"),
    "core": Entry("bench.bench_core", "what the ring's state machines cost a fill, with up to 1,000 replicas"),
    "ranks": Entry("bench.bench_ranks", "a step and its loss over several ranks, and a ring for every rank"),
    "loss": Entry("bench.bench_kd_loss", "time and memory of the fused loss, against the full one"),
}
#: Runs some of the benches itself, and the trainings beside them: no part of `all`.
REPORT = {"report": Entry("bench.bench_report", "what the project claims, measured here, as one page")}
ALL = {"all": Entry("bench.__main__", "each of these in turn, at its defaults")}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a figure is beyond its limit or a bench failed, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] != "all":
        return dispatch(PROG, BENCHES | REPORT | ALL, arguments)
    if arguments[1:] in (["--help"], ["-h"]):
        print(f"usage: {PROG} all    (no flags: it runs these in turn, each at its defaults)")
        print("\n".join(f"  {name:<9}  {entry.about}" for name, entry in BENCHES.items()))
        return 0
    if len(arguments) > 1:
        print(
            f"{PROG}: error: all takes no flags, found {' '.join(arguments[1:])}; allowed: flags with one bench",
            file=sys.stderr,
        )
        return 2
    # A process each: peak memory, threads and cores of one are not those of the next.
    commands = {name: tethered([sys.executable, "-m", "bench", name]) for name in BENCHES}
    try:
        codes = {name: subprocess.run(command, check=False).returncode for name, command in commands.items()}
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr, flush=True)
        return 130
    failed = [f"{name} (exit {code})" for name, code in codes.items() if code != 0]
    if failed:
        print(f"{PROG}: failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
