"""The file that `--config` names, read and checked before the command's parser sees it, and what a setting may be, in
words: the parser's own speak of Python's types."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from ring.core.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def allowed_values(hint: object) -> str:
    """What a setting of that type may be."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if kind is type(None) else allowed_values(kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        *others, last = map(str, get_args(hint))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(hint) is tuple:
        return "a list, as in [one, two]"
    return _WORDS.get(hint, str(hint)) if isinstance(hint, type) else str(hint)


def check_files(argv: Sequence[str], hints: Mapping[str, object]) -> None:
    """hints: the type of each setting. Raises ConfigError: a file of `--config` in argv can't be read, or holds
    something else than settings."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", action="append", default=[])
    try:
        names = finder.parse_known_args(list(argv))[0].config
    except argparse.ArgumentError:
        return  # the command's own parser has the words for it
    for name in names:
        _check_file(name, hints)


def closest(name: str, known: Sequence[str]) -> str:
    """A hint at what was meant; empty: nothing is like it."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f" (the closest is {found[0]})" if found else ""


def _check_file(name: str, hints: Mapping[str, object]) -> None:
    about = f"--config {name or repr(name)}"
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{about}: {error.strerror}; allowed: a YAML or JSON file of settings") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{about}: it is no YAML: {_in_a_line(error)}; allowed: lines like batch_size: 8") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigError(f"{about}: it holds {found}; allowed: settings, as in batch_size: 8")
    for key, value in content.items():
        if key not in hints:
            raise ConfigError(
                f"{about}: no setting is called {key!r}{closest(str(key).replace('-', '_'), list(hints))}; allowed: "
                f"the flags in --help, with underscores and without the leading dashes"
            )
        if not _fits(value, hints[key]):
            raise ConfigError(f"{about}: {key} must be {allowed_values(hints[key])}, got {value!r}")


def _in_a_line(error: Exception) -> str:
    """Where the file goes wrong, without the piece of it that YAML draws over several lines."""
    mark = getattr(error, "problem_mark", None)
    return " ".join(str(error).split()) if mark is None else f"line {mark.line + 1}: {getattr(error, 'problem', '')}"


def _fits(value: Any, hint: object) -> bool:
    """Whether YAML's value may stand for one of that type; one that is written as text may turn out to be a number."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, kind) for kind in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(one, get_args(hint)[0]) for one in value)
    if hint is float:
        # YAML's own numbers need a point: 1e-3 is text to it.
        return _is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True
