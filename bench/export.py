"""`disaggkd export RUN DIR`: the newest checkpoint of a run, whole or in shards, as one Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ring.command import run, set_up_logging
from ring.core.errors import ConfigError

PROG = "disaggkd export"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; allowed flags: {PROG} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description=(__doc__ or "").strip())
    parser.add_argument("run", metavar="RUN", type=Path, help="the --out of a run, its checkpoints/, or one checkpoint")
    parser.add_argument("directory", metavar="DIR", type=Path, help="what `from_pretrained` is to load; is replaced")
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        parsed = _parser().parse_args(arguments)
        set_up_logging(debug=parsed.debug)
        if parsed.directory.exists() and not (parsed.directory / "config.json").exists():
            raise ConfigError(f"{parsed.directory} is there and holds no model; allowed: a new directory, or a model's")
        # Only now: a wrong flag is answered without loading torch.
        from student.export import export_checkpoint

        step = export_checkpoint(parsed.run, parsed.directory)
        print(f"the student after step {step}: {parsed.directory}", flush=True)

    return run(command, prog=PROG, debug="--debug" in arguments)


if __name__ == "__main__":
    sys.exit(main())
