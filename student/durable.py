"""Directories that are whole or not there: written aside, synced, renamed, and put right again after a kill.

A power cut may come at any moment too. So a name is given only to what is on the disk already, files before the
directories that name them, and the directory that holds the name is synced last.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

# What a killed process may leave; no reader takes any of these for the real thing.
_WRITING, _REPLACED, _REMOVING = ".writing-", ".replaced-", ".removing-"
# Room for config, tokenizer and state beside the tensors.
_SLACK_BYTES = 32 << 20

_log = logging.getLogger(__name__)


def write_directory(path: Path, fill: Callable[[Path], None], *, needed_bytes: int) -> None:
    """Make the directory `path` with what `fill` writes into the one that it is given; one that is there is replaced.

    Raises what `fill` raises, and OSError where the disk is full (`needed_bytes` are looked for beforehand) or fails:
    `path` is as it was, and nothing of the new one is left; where even that fails a warning says so, and the next write
    takes it away."""
    root = path.parent
    aside = root / f"{_WRITING}{path.name}"
    try:
        _make_directory(root)
        recover(root, glob.escape(path.name))
        free_bytes = shutil.disk_usage(root).free
        if free_bytes < needed_bytes + _SLACK_BYTES:
            raise OSError(f"{needed_bytes + _SLACK_BYTES} bytes needed, {free_bytes} free")
        aside.mkdir()
        fill(aside)
        _sync_tree(aside)
        _put_in_place(aside, path)
    except BaseException:
        _remove(aside)
        raise
    _remove_if_there(root / f"{_REPLACED}{path.name}")


def recover(root: Path, pattern: str) -> None:
    """Put right what a killed process left of the directories in `root` whose names match `pattern`.

    One that was being replaced is put back where the new one is not in its place; what was half written or half removed
    goes. Nobody else may be writing there."""
    for replaced in sorted(root.glob(f"{_REPLACED}{pattern}")):
        path = root / replaced.name.removeprefix(_REPLACED)
        if path.exists():
            _remove_if_there(replaced)
        else:
            replaced.rename(path)
            sync(root)
            _log.warning("%s was being replaced when a process was killed: the old one is back", path)
    for prefix in (_WRITING, _REMOVING):
        for leftover in sorted(root.glob(f"{prefix}{pattern}")):
            _remove(leftover)


def remove_directory(path: Path) -> None:
    """Remove a directory: at once for every reader, whatever interrupts it. A failure is only warned about."""
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    try:
        path.rename(doomed)
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)
    else:
        _remove(doomed)


def sync(path: Path) -> None:
    """A file's content, or a directory's names, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(path: Path) -> None:
    """With all above it, each known to the one that holds it."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in reversed(missing):
        sync(directory.parent)


def _put_in_place(aside: Path, path: Path) -> None:
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        # Between the two renames neither name is there: `recover` knows what that means.
        path.rename(replaced)
    try:
        aside.rename(path)
        sync(path.parent)
    except OSError:
        if path.exists():
            path.rename(aside)
        if replaced.exists():
            replaced.rename(path)
        raise


def _sync_tree(directory: Path) -> None:
    """Everything below reaches the disk, readable like any other file (safetensors writes them private)."""
    mode = 0o666 & directory.stat().st_mode  # made with all that this process gives to others
    for entry in sorted(directory.rglob("*")):
        if entry.is_file():
            entry.chmod(mode)
        sync(entry)
    sync(directory)


def _remove_if_there(replaced: Path) -> None:
    """What was replaced. Under another name first: half removed it must never be put back."""
    if replaced.exists():
        doomed = replaced.with_name(replaced.name.replace(_REPLACED, _REMOVING, 1))
        try:
            replaced.rename(doomed)
        except OSError as error:
            _log.warning("%s could not be removed: %s", replaced, error)
        else:
            _remove(doomed)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        # Whatever took its place is durable already: the run goes on.
        _log.warning("%s could not be removed: %s", path, error)
