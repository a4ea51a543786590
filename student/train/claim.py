"""--out belongs to one run: the lock that says so, and whether what is there is still this run's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ring.core.errors import ConfigError
from student.checkpoint import CheckpointError

LOCK_FILE = ".lock"


class Claim:
    """Held while the block of `claimed` runs. It goes where its directory is moved to; the name may then be another
    run's."""

    def __init__(self, root: Path, word: str) -> None:
        """Raises ConfigError: it is another run's. Raises OSError."""
        self._root = root
        self._word = word
        with contextlib.ExitStack() as opened:
            self._directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, self._directory)
            self._lock = _locked(root / LOCK_FILE)
            opened.callback(lambda: os.close(self._lock))
            self._write_word()
            self._opened = opened.pop_all()

    def check(self) -> None:
        """Called before anything is written there by name. Raises CheckpointError: it was moved, removed or replaced,
        or another run has begun there; what has its name now is left alone."""
        try:
            if not _is_at(self._directory, self._root):
                raise CheckpointError(
                    f"--out {self._root} was moved or removed while the run goes on; what has that name now is left as "
                    f"it is; allowed: the directory that the run began in (move it back and --resume)"
                )
            self._renew()
        except ConfigError as error:
            raise CheckpointError(f"{error}; this run's lock was removed") from error
        except OSError as error:
            raise CheckpointError(f"--out {self._root} can't be looked at: {error.strerror}") from error

    def release(self) -> bool:
        """Remove the lock while it is held still: whoever has opened it sees that it is gone. Returns whether --out is
        ours to this end."""
        with self._opened:
            try:
                is_ours = _is_at(self._directory, self._root) and _is_at(self._lock, self._root / LOCK_FILE)
                if is_ours:
                    (self._root / LOCK_FILE).unlink()
            except OSError:
                return False
            return is_ours

    def _renew(self) -> None:
        """What is cleaned of old files may have lost the lock: it is taken again, if nobody else has."""
        os.utime(self._lock)
        if not _is_at(self._lock, self._root / LOCK_FILE):
            before, self._lock = self._lock, _locked(self._root / LOCK_FILE)
            os.close(before)
            self._write_word()

    def _write_word(self) -> None:
        # Emptied only now that it is ours.
        os.truncate(self._lock, 0)
        os.write(self._lock, self._word.encode())
        os.fsync(self._lock)


@contextlib.contextmanager
def claimed(root: Path, word: str = "") -> Iterator[Claim]:
    """This process alone writes to --out while the block runs, and `word` stands there. Afterwards nothing is left of
    that; of a run that wrote nothing not even the directories that were made for it.

    Raises ConfigError: it can't."""
    made: list[Path] = []
    try:
        made += [directory for directory in (root, *root.parents) if not directory.exists()]
        root.mkdir(parents=True, exist_ok=True)
        claim = Claim(root, word)
    except OSError as error:
        _remove_if_empty(made)
        raise ConfigError(f"--out {root}: {error.strerror}; allowed: a directory that can be written") from error
    try:
        yield claim
    finally:
        if claim.release():
            _remove_if_empty(made)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the name leads to what is open. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return False
        raise


def _locked(path: Path) -> int:
    """A descriptor of the file at a path, which is ours until it is closed. Raises ConfigError: it is another's. Raises
    OSError."""
    while True:
        with contextlib.ExitStack() as opened:
            lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"--out {path.parent}: another run is writing there; allowed: a directory of its own"
                ) from error
            if _is_at(lock, path):
                opened.pop_all()
                return lock
            # It was removed by the run that held it, between the two calls.


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
