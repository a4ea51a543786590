"""`python -m student.train`: distils a teacher into a student, or trains it on labels alone (--kd-weight 0)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PROG = "student.train"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 trained all, 2 bad usage, 3 teacher lost, 128 + signal, 1 otherwise."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Imports only from here on: Ctrl-C in the midst of one is said in a line too.
    try:
        from ring.command import run
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130

    def command() -> None:
        import logging

        from ring.command import describe, parse, set_up_logging, tell
        from student.config import TrainConfig, with_demo_defaults

        config = with_demo_defaults(parse(TrainConfig, arguments, prog=PROG, description=__doc__ or ""))
        set_up_logging(debug=config.debug)
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first:
            tell(f"{PROG}\n{describe(config)}")
        elif not config.debug:
            # What all ranks have to say the first one says.
            logging.getLogger("student").setLevel(logging.WARNING)
        # Only now: `--help` and a wrong flag are answered without loading torch.
        from student.parallel.ranks import launched
        from student.train.run import train

        train(config, launched())

    return run(command, prog=PROG, debug=debug, waits_for_output=False)


if __name__ == "__main__":
    sys.exit(main())
