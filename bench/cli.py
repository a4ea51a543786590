"""`disaggkd`: one command in front of the others. Each subcommand is the `python -m` command of the same work."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple, Protocol, cast

from ring.starting import ending_at_once

PROG = "disaggkd"


class Command(Protocol):
    """A module that is a command."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run it; returns the exit code."""


class Entry(NamedTuple):
    """Where a command is, and what it is for."""

    module: str
    about: str


#: By name; a module is imported only when its command runs, so that help never waits for torch.
COMMANDS = {
    "serve": Entry("teacher.serve", "a teacher replica as a process (python -m teacher.serve)"),
    "train": Entry("student.train.__main__", "distil a teacher into a student (python -m student.train)"),
    "plan": Entry("planner.cli", "what fits, what limits it and what to rent (python -m planner)"),
    "bench": Entry("bench.__main__", "throughput and memory against their targets (python -m bench)"),
    "keys": Entry("bench.keys", "key pairs for --auth: who may connect, and nobody else listens"),
    "export": Entry("bench.export", "a run's newest checkpoint as a Hugging Face directory"),
    "doctor": Entry("bench.doctor", "what the transports find on this machine, and what to do about it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: what the subcommand says, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == "--version":
        print(f"{PROG} {metadata.version('disaggkd')}")
        return 0
    return dispatch(PROG, COMMANDS, arguments)


def dispatch(prog: str, commands: dict[str, Entry], arguments: Sequence[str]) -> int:
    """Run the one of `commands` that the first argument names, with the rest of them."""
    if arguments and arguments[0] in ("--help", "-h"):
        print(usage(prog, commands))
        return 0
    found = repr(arguments[0]) if arguments else "none"
    if not arguments or arguments[0] not in commands:
        allowed = ", ".join(commands)
        print(f"{prog}: error: needs a subcommand, found {found}; allowed: {allowed}", file=sys.stderr, flush=True)
        return 2
    with ending_at_once(f"{prog} {arguments[0]}"):  # some import torch, in whose midst a signal would be a traceback
        command = cast(Command, importlib.import_module(commands[arguments[0]].module))
    return command.main(arguments[1:])


def usage(prog: str, commands: dict[str, Entry]) -> str:
    """The help text."""
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {entry.about}" for name, entry in commands.items()]
    return "\n".join([f"usage: {prog} SUBCOMMAND [FLAGS]    ({prog} SUBCOMMAND --help says which flags)", *lines])


if __name__ == "__main__":
    sys.exit(main())
