"""How every command of DisaggKD reads its configuration, and how it ends.

A command's configuration is one frozen dataclass; each field made with `flag(...)` is a `--flag` and a key of the
`--config` file. Argument beats file beats default, unknown keys are refused, and what is wrong is said in one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser

from ring.config_file import allowed_values, check_files, closest
from ring.core.errors import ConfigError, DisaggKDError
from ring.outputs import open_standard_streams, unhindered_outputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    ConfigT = TypeVar("ConfigT", bound=DataclassInstance)
else:
    ConfigT = TypeVar("ConfigT")

FlagT = TypeVar("FlagT")

#: How the parser says that a value is of the wrong type.
_WRONG_VALUE = re.compile(
    r'Parser key "(?P<key>\w+)"(?P<element> element \d+)?: .*(?:Got value|Given value): (?P<value>.*)'
)
#: Parts of a flag's metavar that say it takes a path.
_PATHS = frozenset({"DIR", "FILE"})
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (?P<flag>--[^ =]+).*")


def flag(default: FlagT, text: str, *, metavar: str | None = None) -> FlagT:
    """A field of a command's configuration; `text` is its help, with units and what else is allowed."""
    made: FlagT = dataclasses.field(default=default, metadata={"help": text, "metavar": metavar})
    return made


def parse(config_type: type[ConfigT], argv: Sequence[str], *, prog: str, description: str) -> ConfigT:
    """The configuration that argv and its `--config` file ask for; `--help` prints and exits with 0.

    Raises ConfigError: an unknown flag or key, a value of the wrong type, or one that the dataclass refuses."""
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False, default_env=False)
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML or JSON file of these settings")
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        _add(parser, field, hints[field.name])
    argv = [_with_home("--config=", argument) for argument in argv]
    check_files(argv, hints)
    try:
        found = parser.parse_args(argv).as_dict()
    except (ArgumentError, ValueError, OSError) as error:
        raise ConfigError(f"{_in_our_words(one_line(str(error)), hints)}; allowed flags: {prog} --help") from error
    values = {field.name: _value(field, found[field.name]) for field in dataclasses.fields(config_type)}
    return config_type(**values)


def _value(field: dataclasses.Field[object], found: object) -> object:
    """As the dataclass takes it. In the name of a file or directory `~` is the user's home: in `--out=~/run`, and in a
    file of settings, no shell has looked at it."""
    names_a_path = _PATHS & set(str(field.metadata["metavar"]).split("|"))
    items = found if isinstance(found, list) else [found]
    if names_a_path:
        items = [os.path.expanduser(item) if isinstance(item, str) else item for item in items]
    return tuple(items) if isinstance(found, list) else items[0]


def _with_home(prefix: str, argument: str) -> str:
    if not argument.startswith(prefix):
        return argument
    return prefix + os.path.expanduser(argument.removeprefix(prefix))


def _in_our_words(reason: str, hints: Mapping[str, object]) -> str:
    """What the parser says of a value, as we say it elsewhere; anything else as it is."""
    match = _WRONG_VALUE.fullmatch(reason)
    if match is not None and match["key"] in hints:
        hint = hints[match["key"]]
        of_a_list = match["element"] is not None and get_origin(hint) is tuple
        allowed = allowed_values(get_args(hint)[0] if of_a_list else hint)
        return f"--{match['key'].replace('_', '-')} must be {allowed.removesuffix(' or null')}, got {match['value']!r}"
    unknown = _UNKNOWN_FLAG.fullmatch(reason)
    if unknown is not None:
        return reason + closest(unknown["flag"], ["--" + name.replace("_", "-") for name in hints])
    return reason


def _add(parser: ArgumentParser, field: dataclasses.Field[object], hint: object) -> None:
    name = "--" + field.name.replace("_", "-")
    text, metavar = field.metadata["help"], field.metadata["metavar"]
    if hint is bool:
        parser.add_argument(name, type=bool, default=field.default, nargs="?", const=True, help=text, metavar="BOOL")
    elif get_origin(hint) is tuple:
        item = get_args(hint)[0]
        default = list(field.default) if isinstance(field.default, tuple) else []
        parser.add_argument(name, type=item, nargs="+", default=default, help=text, metavar=metavar)
    else:
        parser.add_argument(name, type=hint, default=field.default, help=text, metavar=metavar)


def describe(config: DataclassInstance) -> str:
    """The whole configuration, one `key: value` a line."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    width = max(len(name) for name in values)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in values.items())


def run(command: Callable[[], None], *, prog: str, debug: bool, waits_for_output: bool = True) -> int:
    """Run a command; a known error becomes one line on stderr and its exit code, with a traceback only for `debug`.

    waits_for_output: a terminal or pipe that takes nothing holds the command up, as one expects of a short one."""
    open_standard_streams()
    with contextlib.nullcontext() if waits_for_output else unhindered_outputs(), _noted_interrupts() as interrupts:
        try:
            command()
        except KeyboardInterrupt as error:
            return _interrupted(prog, error)
        except Exception as error:  # noqa: BLE001 - nothing is lost: the line names it, and --debug shows where
            if interrupts and (isinstance(error, ConfigError) or not isinstance(error, DisaggKDError)):
                # It struck in the midst of an import, say, which made something else of it.
                return _interrupted(prog, KeyboardInterrupt())
            return _failed(prog, error, debug=debug or _shows_debug())
    return 0


def _failed(prog: str, error: Exception, *, debug: bool) -> int:
    """Says it; returns the exit code."""
    if debug:
        tell("".join(traceback.format_exception(error)))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if isinstance(error, DisaggKDError):
        tell(f"{prog}: error: {one_line(str(error))}")
        return error.exit_code
    where = "" if debug else "; --debug shows where"
    tell(f"{prog}: error: {type(error).__name__}: {one_line(str(error))}{where}")
    return 1


def _interrupted(prog: str, error: KeyboardInterrupt) -> int:
    """Says it; returns the exit code. A handler of another signal than SIGINT raises it with that one's number."""
    tell(f"{prog}: interrupted")
    number = error.args[0] if error.args else signal.SIGINT
    return 128 + (number if isinstance(number, int) else signal.SIGINT)


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """SIGINT as Python handles it, and noted: not all code lets a KeyboardInterrupt through."""
    noted: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted  # ignored, as a shell's `&` leaves it; or whoever called us has a handler
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def tell(text: str) -> None:
    """Say something on stderr. Where nothing takes it any more (a full disk, a reader that left) it is lost: that is no
    reason to end, nor to end with another code."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def set_up_logging(*, debug: bool) -> None:
    """Log lines go to stderr; stdout is for results. Libraries are heard from WARNING on, whatever `debug` says."""
    for name in ("ring", "transport", "teacher", "student"):
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


class _OneLine(logging.Formatter):
    """Messages hold what peers say of themselves: none of it may begin a line of its own or steer the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return escaped(super().formatMessage(record))


def _shows_debug() -> bool:
    """Whether `set_up_logging` was told so: by a configuration file, say, which the caller of `run` has not read."""
    return logging.getLogger(__name__).isEnabledFor(logging.DEBUG)


def one_line(text: str) -> str:
    """Any message on a single line."""
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """The text with its control characters written out, as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
