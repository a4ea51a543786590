"""Directories that a demo or report may empty and delete: only those that hold our own mark, written when it made them.

Where --out leads nobody but the user knows: a `teacher` or `kd` there may be a checkpoint of somebody's, and what is
deleted is not to be had back. So everything is looked at before anything is touched, and whatever has no mark is left.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ring.core.errors import ConfigError

#: In each directory that was made here; `OUT_MARK` in the --out directory itself, of which only files by our names are
#: ever replaced.
MARK, OUT_MARK = ".disaggkd-made", ".disaggkd-out"
_SAYS = "Made by a demo or report of DisaggKD, which empties or deletes this directory when it is run again.\n"
_OUT_SAYS = "A demo or report of DisaggKD writes into this directory.\n"


def claim_out(out: Path, *, directories: Sequence[str], files: Sequence[str]) -> None:
    """Make the --out directory, if it is not there, for a command that writes these names into it.

    Raises ConfigError: something of such a name is there that was not made here; nothing changed."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: no directory; allowed: a directory, there or not yet")
    for name in directories:
        if not is_ours(out / name):
            raise ConfigError(_refusal(out, out / name))
    taken = [name for name in files if _is_there(out / name)]
    if taken and not (out / OUT_MARK).exists():
        raise ConfigError(_refusal(out, out / taken[0]))
    out.mkdir(parents=True, exist_ok=True)
    (out / OUT_MARK).write_text(_OUT_SAYS)


def is_ours(directory: Path) -> bool:
    """Whether nothing of anybody else's is lost with it: it is not there, empty, or has our mark. A link never is."""
    if not _is_there(directory):
        return True
    if directory.is_symlink() or not directory.is_dir():
        return False
    return is_made(directory) or not any(directory.iterdir())


def is_made(directory: Path) -> bool:
    """Whether it is there, and was made here."""
    return (directory / MARK).is_file()


def claim(directory: Path) -> None:
    """Make it, if it is not there; mark it. Raises ConfigError: it holds something and no mark, and is as it was."""
    if not is_ours(directory):
        raise ConfigError(_refusal(directory.parent, directory))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARK).write_text(_SAYS)


def renew(directory: Path) -> None:
    """As `claim`, and nothing but the mark is in it. Raises as `claim`."""
    claim(directory)
    # The mark stays all the while: a command that is killed here finds its own directory again.
    for path in directory.iterdir():
        if path.name == MARK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(directory: Path) -> None:
    """It is not there afterwards. Raises as `claim`."""
    if _is_there(directory):
        renew(directory)
        (directory / MARK).unlink()
        directory.rmdir()


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _refusal(out: Path, path: Path) -> str:
    what = f"is there, and no {OUT_MARK} beside it says" if path.is_file() else f"holds something, and no {MARK} says"
    return f"--out {out}: {path} {what} that a demo or report made it; allowed: another --out, or one without that"
