"""--out belongs to one run: the lock that says so, and whether what is there is still this run's."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ring.core.errors import ConfigError
from student.checkpoint import CheckpointError

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class Claim:
    """Held while the block of `claimed` runs. The lock goes where its directory is moved to; the name may then be
    another run's."""

    root: Path
    lock: TextIO

    def is_ours(self) -> bool:
        """Whether --out still leads to the directory that was claimed. Raises OSError."""
        try:
            return os.path.samestat(os.fstat(self.lock.fileno()), (self.root / LOCK_FILE).stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def check(self) -> None:
        """Called before anything is written there by name. Raises CheckpointError: it was moved, removed or replaced;
        nothing is written to what has its name now."""
        try:
            is_ours = self.is_ours()
        except OSError as error:
            raise CheckpointError(f"--out {self.root} can't be looked at: {error.strerror}") from error
        if not is_ours:
            raise CheckpointError(
                f"--out {self.root} was moved or removed while the run goes on, or its {LOCK_FILE} was; what has that "
                f"name now is not this run's and stays as it is"
            )


@contextlib.contextmanager
def claimed(root: Path, word: str = "") -> Iterator[Claim]:
    """This process alone writes to --out while the block runs, and `word` stands there. Afterwards nothing is left of
    that; of a run that wrote nothing not even the directories that were made for it.

    Raises ConfigError: it can't."""
    made = [directory for directory in (root, *root.parents) if not directory.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = _locked(root / LOCK_FILE)
    except OSError as error:
        _remove_if_empty(made)
        raise ConfigError(f"--out {root}: {error.strerror}; allowed: a directory that can be written") from error
    claim = Claim(root, lock)
    with lock, _released(claim, made):
        try:
            # Emptied only now that it is ours.
            lock.truncate(0)
            lock.write(word)
            lock.flush()
            os.fsync(lock.fileno())
        except OSError as error:
            raise ConfigError(f"--out {root}: {error.strerror}; allowed: a directory that can be written") from error
        yield claim


@contextlib.contextmanager
def _released(claim: Claim, made: Sequence[Path]) -> Iterator[None]:
    """Removes the lock at the end of the block, while it is held still: whoever has opened it sees that it is gone."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if claim.is_ours():
                (claim.root / LOCK_FILE).unlink()
        _remove_if_empty(made)


def _locked(path: Path) -> TextIO:
    """The file at a path, which is ours until it is closed. Raises ConfigError: it is another's. Raises OSError."""
    while True:
        lock = path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if Claim(path.parent, lock).is_ours():
                return lock
        except BlockingIOError as error:
            lock.close()
            message = f"--out {path.parent}: another run is writing there; allowed: a directory of its own"
            raise ConfigError(message) from error
        except BaseException:
            lock.close()
            raise
        lock.close()  # it was removed by the run that held it, between the two calls


def _remove_if_empty(directories: Sequence[Path]) -> None:
    """From the innermost on."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def check_shared(root: Path, word: str) -> None:
    """Raises ConfigError: --out is not where rank 0 claimed it with this word, but a directory of this host's own."""
    found = None
    with contextlib.suppress(OSError):
        found = (root / LOCK_FILE).read_text()
    if found != word:
        raise ConfigError(
            f"--out {root}: not the directory that rank 0 has under this name; allowed: a directory on a file system "
            f"that all ranks share"
        )
