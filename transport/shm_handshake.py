"""How the slots of the shm backend get from the student's process into the teacher's.

The student listens on a private unix socket (directory 0700, socket 0600) whose path travels in the OFFER together with
a random token. The teacher connects and proves the token; the student checks the user id that the kernel vouches for
and sends the memfds of the slots along. Once that is done socket and directory are removed: nothing is left to leak.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import secrets
import select
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ring.core.errors import ConfigError, DeadlineExceeded, RemoteProtocolError, TransportError
from ring.core.messages import Description
from transport.host import descriptors_for, remedy
from transport.memory import SLOT_SEALS, SlotArena, map_slot

_MAGIC = b"dkd1"
_GREETING = struct.Struct("<4sQQ")  # magic, slots, bytes a slot
_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_MAX_FDS_A_MESSAGE = 253  # SCM_MAX_FD
_MAX_STRANGERS = 8  # connections that have not proven the token yet
_TOKEN_BYTES = 32
_SOCKET_NAME = "s"
#: Nobody else names a directory so: what is swept away must be ours.
_DIRECTORY_PREFIX = ".disaggkd-shm-"
_STALE_AFTER_S = 60.0


@dataclass(frozen=True)
class Peer:
    """The teacher's end: its connection, and the process that opened it (0: in a pid namespace we can't see)."""

    connection: socket.socket
    pid: int


class Listener:
    """The student's half: waits for the one teacher that knows the token."""

    def __init__(self, arena: SlotArena) -> None:
        self._arena = arena
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._strangers: list[Peer] = []
        self._directory = ""
        with contextlib.ExitStack() as opened:
            try:
                self._open(opened)
            except OSError as error:
                if remedy(error):
                    raise TransportError(f"shm: can't listen: {error.strerror}{remedy(error)}") from error
                raise ConfigError(
                    f"shm: can't listen in {self._directory or 'a temporary directory'} ({error}); "
                    "set XDG_RUNTIME_DIR or TMPDIR to a writable directory"
                ) from error
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack) -> None:
        self._news = opened.enter_context(select.epoll())
        self._socket = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
        self._directory = _private_directory(opened)
        with _short_path(self._directory) as short:
            self._socket.bind(os.path.join(short, _SOCKET_NAME))
        os.chmod(self.path, 0o600)
        self._socket.listen(_MAX_STRANGERS)
        self._news.register(self._socket, select.EPOLLIN)

    @property
    def path(self) -> str:
        return os.path.join(self._directory, _SOCKET_NAME)

    def describe(self) -> Description:
        return {"path": self.path, "token": self._token}

    def fileno(self) -> int:
        """Readable when `accept` has something to do."""
        return self._news.fileno()

    def accept(self) -> Peer | None:
        """The teacher, once it has proven the token and holds the slots; never blocks. Strangers are turned away.

        Raises TransportError: no descriptor is left, or the kernel would not pass those of the slots on."""
        # Asked before each: without a descriptor to give, accept fails even if nobody is there.
        while is_readable(self._socket.fileno()):
            try:
                self._admit(self._socket.accept()[0])
            except BlockingIOError:  # it left
                break
            except OSError as error:
                raise TransportError(f"shm: can't take a connection: {error}{remedy(error)}") from error
        for stranger in list(self._strangers):
            try:
                token = stranger.connection.recv(_TOKEN_BYTES + 1)
            except BlockingIOError:
                continue
            except OSError:
                token = b""
            self._strangers.remove(stranger)
            self._news.unregister(stranger.connection)
            if hmac.compare_digest(token, self._token):
                try:
                    # A teacher that has ended meanwhile is the caller's to notice, as at any other time.
                    with contextlib.suppress(ConnectionError):
                        self._hand_over(stranger.connection)
                except OSError as error:
                    stranger.connection.close()
                    raise TransportError(
                        f"shm: the slots could not be handed to the teacher: {error}{remedy(error)}"
                    ) from error
                return stranger
            stranger.connection.close()
        return None

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        for stranger in self._strangers:
            stranger.connection.close()
        self._strangers.clear()
        self._opened.close()

    def _admit(self, connection: socket.socket) -> None:
        pid, uid, _ = _peer_credentials(connection)
        if uid != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        if len(self._strangers) == _MAX_STRANGERS:  # the oldest has had its time
            self._strangers.pop(0).connection.close()
        self._strangers.append(Peer(connection, pid))
        self._news.register(connection, select.EPOLLIN)

    def _hand_over(self, connection: socket.socket) -> None:
        connection.send(_GREETING.pack(_MAGIC, self._arena.num_slots, self._arena.slot_bytes))
        fds = [self._arena.fileno(slot) for slot in range(self._arena.num_slots)]
        for first in range(0, len(fds), _MAX_FDS_A_MESSAGE):
            socket.send_fds(connection, [_MAGIC], fds[first : first + _MAX_FDS_A_MESSAGE])


def connect(
    description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float
) -> tuple[socket.socket, list[torch.Tensor]]:
    """The teacher's half: a connection to the student, and its slots mapped into this process.

    Raises RemoteProtocolError: the description or what came over the socket makes no sense. Raises TransportError: the
    student is not there, or turned us away. Raises DeadlineExceeded."""
    path, token = description.get("path"), description.get("token")
    if not (isinstance(path, str) and isinstance(token, bytes) and len(token) == _TOKEN_BYTES):
        raise RemoteProtocolError(f"shm is described by a path and a token; got the keys {sorted(description)}")
    deadline_s = time.monotonic() + timeout_s
    with descriptors_for("shm: a channel"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_time_left_s(deadline_s))
        with _short_path(os.path.dirname(path)) as short:
            connection.connect(os.path.join(short, os.path.basename(path)))
        _, user, _ = _peer_credentials(connection)
        if user != os.getuid():
            # The path is the student's word: whoever may connect must not have us knock at another user's door.
            raise RemoteProtocolError(f"shm: {path} belongs to user {user}; allowed: {os.getuid()}, the teacher's own")
        connection.send(token)
        slots = _receive_slots(connection, num_slots, slot_bytes, deadline_s)
        connection.setblocking(False)
    except TimeoutError as error:
        connection.close()
        raise DeadlineExceeded(f"shm: the student did not hand over its slots within {timeout_s} s") from error
    except OSError as error:
        connection.close()
        raise TransportError(f"shm: can't get the slots over {path}: {error}{remedy(error)}") from error
    except BaseException:
        connection.close()
        raise
    return connection, slots


def _peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """(process, user, group) of the other side, as the kernel knows them."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, gid = _PEER_CREDENTIALS.unpack(found)
    return pid, uid, gid


def _receive_slots(connection: socket.socket, num_slots: int, slot_bytes: int, deadline_s: float) -> list[torch.Tensor]:
    greeting = connection.recv(_GREETING.size + 1)
    if not greeting:
        raise TransportError("shm: the student turned us away: wrong token, or it has a teacher already")
    if greeting != _GREETING.pack(_MAGIC, num_slots, slot_bytes):
        raise RemoteProtocolError(
            f"shm: expected {num_slots} slots of {slot_bytes} bytes as offered; the student's greeting says otherwise"
        )
    slots: list[torch.Tensor] = []
    while len(slots) < num_slots:
        connection.settimeout(_time_left_s(deadline_s))
        message, fds, flags, _ = socket.recv_fds(
            connection, len(_MAGIC) + 1, _MAX_FDS_A_MESSAGE, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if flags & socket.MSG_CTRUNC:
                raise TransportError("shm: no descriptors are left for the slots: raise `ulimit -n`")
            if message != _MAGIC or not fds or len(slots) + len(fds) > num_slots:
                raise RemoteProtocolError(f"shm: the student sent {len(slots) + len(fds)} of {num_slots} slots")
            slots += [_checked_slot(fd, slot_bytes) for fd in fds]
        finally:
            _close_all(fds)
    return slots


def _checked_slot(fd: int, slot_bytes: int) -> torch.Tensor:
    size_bytes = os.fstat(fd).st_size
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seals = 0  # not a memfd
    if size_bytes != slot_bytes or seals & SLOT_SEALS != SLOT_SEALS:
        raise RemoteProtocolError(
            f"shm: a slot has {size_bytes} bytes and seals {seals:#x}; expected {slot_bytes} and {SLOT_SEALS:#x}"
        )
    return map_slot(fd, slot_bytes)


def _private_directory(opened: contextlib.ExitStack) -> str:
    """A new directory that only this user can enter, locked until `opened` is closed, which removes it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir()
    _sweep(parent)
    directory = tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=parent)
    opened.callback(_remove_own, directory)
    opened.callback(os.close, _lock(directory))
    return directory


def _sweep(parent: str) -> None:
    """Remove the directories of processes that were killed between listening and their teacher's arrival."""
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_DIRECTORY_PREFIX):
                with contextlib.suppress(OSError):  # somebody else's, or being removed by another process right now
                    _sweep_one(entry)


def _sweep_one(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    # A directory is locked right after it was made; only an old one without a lock has lost its owner.
    is_old = time.time() - status.st_mtime > _STALE_AFTER_S
    if is_old and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
        lock = _lock(entry.path)
        try:
            if set(os.listdir(entry.path)) <= {_SOCKET_NAME}:  # what holds anything else is not touched
                _remove(entry.path)
        finally:
            os.close(lock)


def _remove_own(directory: str) -> None:
    with contextlib.suppress(OSError):  # it was removed for us, or somebody put something there
        _remove(directory)


def _remove(directory: str) -> None:
    """Remove a listener's socket, if it is there, and its directory. Takes no descriptor: whoever closes a listener may
    have none left. Raises OSError: the directory holds something else, which is still there."""
    path = os.path.join(directory, _SOCKET_NAME)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    os.rmdir(directory)


def _lock(directory: str) -> int:
    """Raises BlockingIOError: its owner lives."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _short_path(directory: str) -> Iterator[str]:
    """Another path of `directory`, so short that a socket in it fits the 108 bytes of a unix address."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def is_readable(fd: int) -> bool:
    """Now. Takes no descriptor."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _time_left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
