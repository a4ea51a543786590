"""`python -m planner` (`disaggkd plan`): which layout fits, what limits it, and what to rent.

    python -m planner --teacher Qwen3.5-35B-A3B --student Qwen3.5-9B --gpus 8 --tokens-per-gpu 8192

Closed forms only: no tensor library is loaded, and the answer takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from planner.answer import Answer, answer_of, record_of
from planner.errors import PlanError
from planner.plan import question_of
from planner.settings import PlanSettings

PROG = "planner"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}; allowed flags: {PROG} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 answered (whether or not it fits), 2 for a question without an answer."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        settings = parse(arguments)
        if settings.list:
            _print_presets()
            return 0
        _print(answer_of(question_of(settings)))
    except PlanError as error:
        sys.stdout.flush()
        print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read the answer has seen enough of it.
        sys.stderr.close()
    return 0


def parse(argv: Sequence[str]) -> PlanSettings:
    """What argv asks for; --help prints and exits. Raises PlanError: a flag or value that is not allowed."""
    parser = _Parser(prog=PROG, description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    hints = get_type_hints(PlanSettings)
    for field in dataclasses.fields(PlanSettings):
        _add(parser, field, hints[field.name])
    return PlanSettings(**vars(parser.parse_args(list(argv))))


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    name, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
    if field.default not in (None, "", False):
        text += f" (default: {'on' if field.default is True else field.default})"
    metavar = field.metadata["metavar"]
    if hint is bool:
        parser.add_argument(
            name, type=_boolean, nargs="?", const=True, default=field.default, help=text, metavar="on|off"
        )
    elif get_origin(hint) is Literal:
        parser.add_argument(name, choices=get_args(hint), default=field.default, help=text)
    else:
        kind = next((part for part in get_args(hint) if part is not NoneType), hint)
        shown = metavar or {int: "N", float: "X", str: "NAME"}[kind]
        parser.add_argument(name, type=kind, default=field.default, help=text, metavar=shown)


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"invalid value {text!r}; allowed: on, off")


def _print(answer: Answer) -> None:
    settings = answer.plan.question.settings
    paths = []
    if settings.sweep != "none":
        # Only here: it draws.
        from planner.plot import write_sweep

        paths = write_sweep(answer)
    if settings.json:
        print(json.dumps(record_of(answer), indent=2))
        return
    # Only here: programs that want JSON need not wait for it.
    from planner.explain import explained
    from planner.report import console, print_answer

    if settings.explain:
        for line in explained(answer):
            print(line)
        print()
    print_answer(answer, console())
    for path in paths:
        print(f"wrote {path}")


def _print_presets() -> None:
    from planner.report import console, print_presets

    print_presets(console())
