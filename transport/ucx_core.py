"""UCX workers, connections and messages. A worker makes progress only while its owner calls it; when it has nothing to
do it is armed, and its descriptor becomes readable with the next event.

Messages are matched here and not by UCX: each is taken off the worker's queue by a probe, and only then received, into
memory that is chosen by its tag and length. Large messages are rendezvous, so what waits in the queue is only their
announcement; their bytes move once `receive` named the place.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
import weakref
from collections.abc import Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ring.core.errors import ConfigError, RemoteProtocolError, TransportError
from transport import ucx_library as lib
from transport.host import descriptors_for

#: Messages from this length on are rendezvous.
RENDEZVOUS_BYTES = 12 * 1024

#: What our channels need, or do better with. UCX_* variables of the user come before these.
_SETTINGS = {
    "RNDV_THRESH": str(RENDEZVOUS_BYTES),
    "MM_ERROR_HANDLING": "y",  # else error handling rules shared memory out
    "KEEPALIVE_INTERVAL": "1s",
}
#: A build of UCX takes only what it has transports for.
_TRANSPORT_SETTINGS = {
    # Segments of 8 KiB, the default, halve the throughput over tcp.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "256K",
    # Verbs repeat for 50 s before they give a dead peer up. Datagrams are acknowledged by the process and not by its
    # card: one that was stopped for a while is not dead, and who is dead the control plane finds out sooner.
    "RC_VERBS_TIMEOUT": "500ms",
    "RC_VERBS_RETRY_COUNT": "3",
    "RC_MLX5_TIMEOUT": "500ms",
    "RC_MLX5_RETRY_COUNT": "3",
    "UD_VERBS_TIMEOUT": "30s",
    "UD_MLX5_TIMEOUT": "30s",
}
_RDMA_TRANSPORT = re.compile(r"(rc|ud|dc)(_verbs|_mlx5|_v|_x)?/")
#: A worker's address has a header and an id at least, and as many bytes more as it has devices.
_ADDRESS_BYTES = range(16, 64 * 1024)
#: Of an address's first byte: the version of its layout.
_ADDRESS_VERSION = 0x0F
_NO_PARAM = lib.RequestParam()
_FORCE = lib.RequestParam(op_attr_mask=lib.OP_FLAGS, flags=lib.CLOSE_FORCE)
_CLOSE_TIMEOUT_S = 1.0


def version() -> str:
    """Of the UCX that was found. Raises ConfigError: it can't be loaded."""
    return str(lib.load().ucp_get_version_string().decode())


class Context:
    """UCX's transports and devices, opened with our settings; registrations of memory belong to it."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.ucp = lib.load()
        with descriptors_for("ucx: what this process has loaded"):
            maps = Path("/proc/self/maps").read_text()
        unsafe = lib.why_unsafe(lib.version(), environ=os.environ, maps=maps)
        if unsafe is not None:
            raise ConfigError(f"UCX {version()} is not safe with {unsafe}; allowed: 1.22 or newer, or without that")
        config, handle = c_void_p(), c_void_p()
        _check(self.ucp.ucp_config_read(None, None, byref(config)), ConfigError, "UCX can't read its settings")
        try:
            for name, value in {**_TRANSPORT_SETTINGS, **settings}.items():
                if f"UCX_{name}" in os.environ:
                    continue
                status = self.ucp.ucp_config_modify(config, name.encode(), value.encode())
                if name not in _TRANSPORT_SETTINGS:
                    _check(status, ConfigError, f"UCX does not take the setting {name}={value}")
            # Workers of a context may be used by different threads, each by one at a time.
            params = lib.Params(
                field_mask=lib.PARAM_FEATURES | lib.PARAM_MT_WORKERS_SHARED,
                features=lib.FEATURE_TAG | lib.FEATURE_WAKEUP,
                mt_workers_shared=1,
            )
            status = self.ucp.ucp_init_version(*lib.API_VERSION, byref(params), config, byref(handle))
            _check(status, ConfigError, f"UCX can't be opened with {dict(settings)}")
        finally:
            self.ucp.ucp_config_release(config)
        self.handle = handle
        weakref.finalize(self, self.ucp.ucp_cleanup, handle).atexit = False

    @property
    def transports(self) -> tuple[str, ...]:
        """What it found, as transport/device."""
        libc = ctypes.CDLL(None)
        libc.open_memstream.restype = c_void_p
        libc.open_memstream.argtypes = (ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(c_size_t))
        text, size = ctypes.c_char_p(), c_size_t()
        stream = c_void_p(libc.open_memstream(byref(text), byref(size)))
        self.ucp.ucp_context_print_info(self.handle, stream)
        libc.fclose(stream)
        found = re.findall(r"--\s+(\S+/\S+)", (text.value or b"").decode())
        libc.free(text)
        return tuple(dict.fromkeys(found))

    @property
    def has_rdma(self) -> bool:
        """Whether it found an RDMA device that it can use."""
        return any(_RDMA_TRANSPORT.match(transport) for transport in self.transports)


_contexts: weakref.WeakValueDictionary[tuple[tuple[str, str], ...], Context] = weakref.WeakValueDictionary()


def context(*, net_devices: str | None = None) -> Context:
    """The context for those devices (UCX's NET_DEVICES; None: all), shared by the channels that use it at a time.

    Raises ConfigError: UCX can't be loaded or does not take the settings."""
    settings = dict(_SETTINGS) if net_devices is None else {**_SETTINGS, "NET_DEVICES": net_devices}
    user = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    key = (*sorted(settings.items()), *sorted(user.items()))
    found = _contexts.get(key)
    if found is None:
        found = _contexts[key] = Context(settings)
    return found


class Transfer:
    """One message on its way. Its memory is kept alive until it is done."""

    def __init__(self, worker: Worker, pointer: int | None, memory: object) -> None:
        self._ucp = worker.ucp
        self._request: c_void_p | None = None
        self._memory: object = memory
        self._status = lib.status_of(pointer)
        if self._status == lib.IN_PROGRESS:
            self._request = c_void_p(pointer)
            worker.transfers.add(self)

    @property
    def is_done(self) -> bool:
        if self._request is not None:
            status = int(self._ucp.ucp_request_check_status(self._request))
            if status == lib.IN_PROGRESS:
                return False
            self._ucp.ucp_request_free(self._request)
            self._status, self._request = status, None
        self._memory = None
        return True

    def error(self) -> str | None:
        """Of a transfer that is done: why its message did not get through whole; None: it did."""
        return None if self._status == lib.OK else lib.describe(self._status)


@dataclass(frozen=True)
class Message:
    """A message that arrived, or that can be fetched. To be received exactly once, else its sender waits for ever."""

    tag: int
    num_bytes: int
    handle: int


class Connection:
    """One way to another worker, with error handling."""

    def __init__(self, worker: Worker, address: bytes) -> None:
        """Raises RemoteProtocolError: that is no address, or can't be reached.

        UCX may end the process where what follows a right beginning is malformed: see `transport.ucx_trial`."""
        own = worker.address()
        if len(address) not in _ADDRESS_BYTES or (address[0] ^ own[0]) & _ADDRESS_VERSION:
            raise RemoteProtocolError(
                f"UCX: an address of {len(address)} bytes that begins with {address[:1].hex()}; ours has {len(own)} "
                f"and begins with {own[:1].hex()}: is it of another version?"
            )
        self._worker = worker
        self._error: str | None = None
        # A weak reference: the callback belongs to this object, which it would keep alive else.
        this = weakref.ref(self)

        def on_error(_arg: int, _endpoint: int, status: int) -> None:
            connection = this()
            if connection is not None:
                connection._error = lib.describe(status)

        self._callback = lib.ErrorCallback(on_error)
        self._address = ctypes.create_string_buffer(address, len(address))
        params = lib.EndpointParams(
            field_mask=lib.EP_REMOTE_ADDRESS | lib.EP_ERR_MODE | lib.EP_ERR_HANDLER,
            address=ctypes.addressof(self._address),
            err_mode=lib.ERR_MODE_PEER,
            err_callback=self._callback,
        )
        self._handle = c_void_p()
        status = worker.ucp.ucp_ep_create(worker.handle, byref(params), byref(self._handle))
        _check(status, RemoteProtocolError, f"UCX can't reach an address of {len(address)} bytes")

    @property
    def error(self) -> str | None:
        """What UCX noticed of the other side's end; None: nothing."""
        return self._error

    def send(self, memory: memoryview | bytes, *, tag: int) -> Transfer:
        """memory: must stay unchanged until the transfer is done. Raises TransportError: the connection is broken."""
        address, num_bytes, owner = _locate(memory)
        pointer = self._worker.ucp.ucp_tag_send_nbx(self._handle, address, num_bytes, tag, byref(_NO_PARAM))
        _check(lib.status_of(pointer), TransportError, "UCX can't send")
        return Transfer(self._worker, pointer, owner)

    def begin_close(self) -> Transfer:
        """Drop what is on its way, without waiting for the other side."""
        return Transfer(self._worker, self._worker.ucp.ucp_ep_close_nbx(self._handle, byref(_FORCE)), self)


#: Of the workers of this process that are open.
_own_addresses: set[bytes] = set()


def is_own_address(address: bytes) -> bool:
    """Whether a worker of this process has it: then nobody else made it up."""
    return address in _own_addresses


class Worker:
    """Sends and receives; one thread at a time may call it. `fileno()`: readable with the next event after `arm()`."""

    def __init__(self, context: Context) -> None:
        self.ucp = context.ucp
        self.transfers: set[Transfer] = set()
        self._context: Context | None = context
        self._connections: list[Connection] = []
        self._addresses: set[bytes] = set()
        self.handle = c_void_p()
        params = lib.WorkerParams(field_mask=lib.WORKER_THREAD_MODE, thread_mode=lib.THREAD_MODE_SERIALIZED)
        status = self.ucp.ucp_worker_create(context.handle, byref(params), byref(self.handle))
        _check(status, TransportError, "UCX can't make a worker")
        fd = c_int()
        try:
            status = self.ucp.ucp_worker_get_efd(self.handle, byref(fd))
            _check(status, TransportError, "UCX has no descriptor to wait on")
        except TransportError:
            self.close()
            raise
        self._fd = fd.value

    def fileno(self) -> int:
        return self._fd

    def address(self) -> bytes:
        """What another worker connects to. Raises TransportError."""
        address, size = c_void_p(), c_size_t()
        status = self.ucp.ucp_worker_get_address(self.handle, byref(address), byref(size))
        _check(status, TransportError, "UCX can't tell the address of a worker")
        try:
            own = ctypes.string_at(address, size.value)
        finally:
            self.ucp.ucp_worker_release_address(self.handle, address)
        self._addresses.add(own)
        _own_addresses.add(own)
        return own

    def connect(self, address: bytes) -> Connection:
        """Returns before the other side knows. Raises RemoteProtocolError: that is no address, or can't be reached."""
        connection = Connection(self, address)
        self._connections.append(connection)
        return connection

    def progress(self, *, budget_s: float) -> bool:
        """Work until nothing is left to do, or the time is over; True: there may be more to do now."""
        progress, until_s = self.ucp.ucp_worker_progress, time.monotonic() + budget_s
        while progress(self.handle):
            if time.monotonic() >= until_s:
                return True
        return False

    def arm(self) -> bool:
        """Have the descriptor tell of the next event; False: there is one already, so make progress instead."""
        status = int(self.ucp.ucp_worker_arm(self.handle))
        if status != lib.BUSY:
            _check(status, TransportError, "UCX can't be waited for")
        return status == lib.OK

    def next_message(self) -> Message | None:
        """Take the oldest message off the queue; None: there is none."""
        info = lib.TagInfo()
        handle = self.ucp.ucp_tag_probe_nb(self.handle, 0, 0, 1, byref(info))
        return Message(info.sender_tag, info.length, handle) if handle else None

    def receive(self, message: Message, memory: memoryview) -> Transfer:
        """Into the first bytes of `memory`; an error unless it has room for all of them."""
        address, num_bytes, owner = _locate(memory)
        pointer = self.ucp.ucp_tag_msg_recv_nbx(self.handle, address, num_bytes, message.handle, byref(_NO_PARAM))
        return Transfer(self, pointer, owner)

    def drop(self, message: Message) -> Transfer:
        """Receive it into nothing: to its sender it was sent."""
        return self.receive(message, memoryview(bytearray(1)))

    def forget_done(self) -> None:
        """Let go of the transfers that are done."""
        self.transfers = {transfer for transfer in self.transfers if not transfer.is_done}

    def close(self) -> None:
        """End the connections and give everything back. Idempotent. In bounded time, whatever the other side does: no
        byte is received or read any more once this returned."""
        if self._context is None:
            return
        while (message := self.next_message()) is not None:
            self.drop(message)
        for connection in self._connections:
            connection.begin_close()
        self._connections.clear()
        until_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while self.transfers and time.monotonic() < until_s:
            self.progress(budget_s=1e-3)
            self.forget_done()
        self.ucp.ucp_worker_destroy(self.handle)
        self.transfers.clear()
        _own_addresses.difference_update(self._addresses)
        self._context = None


def _locate(memory: memoryview | bytes) -> tuple[int, int, object]:
    """(address, length, what keeps it there)."""
    array = np.frombuffer(memory, np.uint8)
    return int(array.ctypes.data), array.size, array


def _check(status: int, kind: type[Exception], what: str) -> None:
    if status < 0:
        raise kind(f"{what}: {lib.describe(status)}")
