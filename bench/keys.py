"""`disaggkd keys DIR`: key pairs for a teacher and a trainer, for `--auth`. Keys that are there are never replaced."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from ring.auth import PEER_SUFFIX, PEERS_NAME, PUBLIC_NAME, SECRET_NAME, make_keyrings
from ring.command import run
from ring.core.errors import ConfigError

PROG = "disaggkd keys"
SIDES = ("teacher", "student")
_OTHER = {"teacher": "student", "student": "teacher"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; allowed flags: {PROG} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description=(__doc__ or "").strip())
    parser.add_argument("directory", metavar="DIR", help="where DIR/teacher and DIR/student are made")
    parser.add_argument(
        "--only", choices=SIDES, help="make one side's keys: the other side makes its own, on its own machine"
    )
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    return parser


def make(directory: str, only: str | None) -> None:
    """Make the keys and say what to do with them. Raises ConfigError: some are there already."""
    for keyring in make_keyrings(directory, SIDES if only is None else (only,)):
        side, other = keyring.directory.name, _OTHER[keyring.directory.name]
        command = "teacher.serve" if side == "teacher" else "student.train"
        print(f"{keyring.directory}: keys of a {side}; give it to {command} as --auth {keyring.directory}")
        print(f"  {SECRET_NAME}  stays with the {side}; whoever has it is the {side}")
        print(f"  {PUBLIC_NAME}  {keyring.public.decode()}")
        trusted = f"holds the {other}'s public key" if only is None else f"empty: copy the {other}'s {PUBLIC_NAME} to"
        where = "" if only is None else f" {keyring.directory / PEERS_NAME / (other + PEER_SUFFIX)}"
        print(f"  {PEERS_NAME}/      {trusted}{where}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        parsed = _parser().parse_args(arguments)
        make(parsed.directory, parsed.only)

    return run(command, prog=PROG, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main())
