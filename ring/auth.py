"""Keys: a directory of them for each side, and the decision who may connect to a teacher that has one.

A teacher or trainer with `--auth DIR` proves who it is with the key pair in DIR (CURVE, zmq's own encryption) and deals
only with the owners of the public keys in DIR/peers. They are read anew whenever one is needed, so that a key can be
added or withdrawn while a run goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ring.core.errors import ConfigError
from transport.wakeup import Wakeup
from transport.zap import Knock, ZapHandler

logger = logging.getLogger(__name__)

SECRET_NAME, PUBLIC_NAME, PEERS_NAME, PEER_SUFFIX = "secret.key", "public.key", "peers", ".pub"
#: More keys, or longer files, are somebody's mistake: each handshake reads them all.
MAX_PEERS = 4096
_MAX_FILE_BYTES = 4096
#: Refused keys that are remembered, so that each is logged once.
_MAX_LOGGED = 1024
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_CURVE_BYTES = 32


@dataclass(frozen=True)
class Keyring:
    """The keys of one side. public, secret: its own pair, as zmq writes them (Z85)."""

    directory: Path
    public: bytes
    secret: bytes = field(repr=False)

    def peers(self) -> dict[bytes, str]:
        """The public keys that are trusted now, each with the name of its file.

        Raises ConfigError: there is none, one is malformed, or others than their owner could have put it there."""
        found: dict[bytes, str] = {}
        directory = self.directory / PEERS_NAME
        try:
            _check_private(directory, forbidden=stat.S_IWGRP | stat.S_IWOTH)
            paths = sorted(directory.glob(f"*{PEER_SUFFIX}"))
            if len(paths) > MAX_PEERS:
                raise ConfigError(f"{directory} holds {len(paths)} keys; allowed: {MAX_PEERS}")
            for path in paths:
                _check_private(path, forbidden=stat.S_IWGRP | stat.S_IWOTH)
                found.setdefault(_read_key(path), path.name)
        except OSError as error:
            raise ConfigError(f"{error.filename or directory} can't be read: {error.strerror}") from error
        if not found:
            raise ConfigError(
                f"{directory} holds no key, so that nobody could be trusted; allowed: the other side's {PUBLIC_NAME}, "
                f"copied there as NAME{PEER_SUFFIX}"
            )
        return found


def load_keyring(directory: str | Path) -> Keyring:
    """The keys in the directory of --auth. Raises ConfigError: they are not there, or others could have read or
    changed them."""
    if not zmq.has("curve"):
        raise ConfigError(f"--auth {directory}: libzmq {zmq.zmq_version()} has no CURVE; pip install 'pyzmq>=26'")
    path = Path(directory)
    try:
        if not path.is_dir():
            raise ConfigError(
                f"--auth {directory}: no such directory; allowed: one of those that `disaggkd keys DIR` made"
            )
        if not (path / SECRET_NAME).exists():
            inside = sorted(entry.parent.name for entry in path.glob(f"*/{SECRET_NAME}"))
            hint = f": it is in {' and '.join(str(path / name) for name in inside)}" if inside else ""
            raise ConfigError(f"--auth {directory}: no {SECRET_NAME} in it{hint}; allowed: a directory of one side")
        _check_private(path, forbidden=stat.S_IWGRP | stat.S_IWOTH)
        _check_private(path / SECRET_NAME, forbidden=stat.S_IRWXG | stat.S_IRWXO)
        secret = _read_key(path / SECRET_NAME)
    except OSError as error:
        raise ConfigError(f"--auth {directory}: {error.filename or path} can't be read: {error.strerror}") from error
    keyring = Keyring(directory=path, public=zmq.curve_public(secret), secret=secret)
    keyring.peers()
    return keyring


def make_keyrings(directory: str | Path, sides: Sequence[str]) -> list[Keyring]:
    """A new directory of keys for each side, `directory`/side, which trust each other. Nothing is ever overwritten.

    Raises ConfigError: one is there already, or can't be written; then none was made."""
    root = Path(directory)
    present = [str(root / side) for side in sides if (root / side).exists()]
    if present:
        raise ConfigError(f"{' and '.join(present)}: there already; allowed: another directory, keys are not replaced")
    pairs = {side: zmq.curve_keypair() for side in sides}
    made: list[tuple[Path, Path]] = []
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for side, (public, secret) in pairs.items():
            # Aside, under a name that nobody can guess and only we can enter; whole once it has its own name.
            aside = Path(tempfile.mkdtemp(prefix=f".{side}-", dir=root))
            made.append((aside, root / side))
            (aside / PEERS_NAME).mkdir(mode=0o700)
            _write_key(aside / SECRET_NAME, secret, mode=0o600)
            _write_key(aside / PUBLIC_NAME, public, mode=0o644)
            for other, (other_public, _) in pairs.items():
                if other != side:
                    _write_key(aside / PEERS_NAME / f"{other}{PEER_SUFFIX}", other_public, mode=0o644)
        _name_all(made)
    except OSError as error:
        raise ConfigError(f"{error.filename or root} can't be written: {error.strerror}") from error
    finally:
        for aside, _ in made:
            _remove_aside(aside, sides)
    return [Keyring(directory=root / side, public=public, secret=secret) for side, (public, secret) in pairs.items()]


def _name_all(made: Sequence[tuple[Path, Path]]) -> None:
    """Give directories their final names, all or none. Raises OSError."""
    with contextlib.ExitStack() as undo:
        for aside, final in made:
            aside.rename(final)
            undo.callback(final.rename, aside)
        undo.pop_all()


def _remove_aside(aside: Path, sides: Sequence[str]) -> None:
    """A secret goes first. Opens nothing: it may be for want of descriptors that the keys were not made."""
    peers = [aside / PEERS_NAME / f"{side}{PEER_SUFFIX}" for side in sides]
    for path in (aside / SECRET_NAME, aside / PUBLIC_NAME, *peers):
        with contextlib.suppress(OSError):
            path.unlink()
    for directory in (aside / PEERS_NAME, aside):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _write_key(path: Path, key: bytes, *, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(key + b"\n")


def _read_key(path: Path) -> bytes:
    """Raises ConfigError: anything but one key in one line; lines that begin with `# ` are comments."""
    with path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(b"# ")]
    if len(text) > _MAX_FILE_BYTES or len(lines) != 1 or not _is_key(lines[0]):
        # What it holds is not shown: it may be a secret in the wrong place.
        raise ConfigError(f"{path} holds no key; allowed: one line of 40 characters, as `disaggkd keys` writes it")
    return lines[0]


def _is_key(text: bytes) -> bool:
    if _Z85.fullmatch(text) is None:
        return False
    try:
        return len(z85.decode(text)) == _CURVE_BYTES
    except (ValueError, KeyError, struct.error):  # of the last: five characters that stand for more than 32 bits
        return False


def _check_private(path: Path, *, forbidden: int) -> None:
    """Raises ConfigError: the mode of the file gives a right to others that they must not have."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to user {status.st_uid}; allowed: user {os.geteuid()}, who runs this, or 0")
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        others = "go=" if forbidden & stat.S_IRGRP else "go-w"
        raise ConfigError(f"{path} has mode {mode:04o}, which lets others in; allowed: `chmod {others} {path}`")


class Gatekeeper:
    """Lets those into a teacher's port whose key is among the trusted ones, and says once who was refused."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring) -> None:
        self._keyring = keyring
        self._refused: set[bytes] = set()
        self.socket = context.socket(zmq.ROUTER)
        self._handler = ZapHandler(self.socket, self._admits)
        self._more = Wakeup()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make this socket a server with our key, before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keyring.secret)
        ZapHandler.guard(socket)

    def answer(self) -> None:
        """Decide about some that knocked since the last call; `wait_fds` says when there are more."""
        if self._handler.answer():
            self._more.set()
        else:
            self._more.clear()

    def wait_fds(self) -> tuple[int, int]:
        # zmq's own descriptor tells of a knock once, whether it was answered or not.
        return int(self.socket.getsockopt(zmq.FD)), self._more.fileno()

    def close(self) -> None:
        self.socket.close(linger=0)
        self._more.close()

    def _admits(self, knock: Knock) -> bool:
        key = z85.encode(knock.credentials[0]) if knock.mechanism == b"CURVE" else b""
        try:
            name = self._keyring.peers().get(key)
        except ConfigError as error:
            logger.warning("refused %s: %s", knock.address, error)
            return False
        if name is not None:
            logger.info("%s connects with the key %s", knock.address, name)
            return True
        if key not in self._refused and len(self._refused) < _MAX_LOGGED:
            self._refused.add(key)
            logger.warning(
                "refused %s: its public key %s is not in %s",
                knock.address,
                key.decode(),
                self._keyring.directory / PEERS_NAME,
            )
        return False
