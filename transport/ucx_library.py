"""libucp itself, through ctypes: the functions and structures of its public C interface that we use.

Which library: the one that the variable DISAGGKD_LIBUCP names, else that of the `libucx` wheel; the system's where
there is no wheel, or where RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY says so, as for other users of that wheel. The interface
has been stable since UCX 1.12, and its structures say themselves which of their fields are set; what follows those is
left out here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from ctypes.util import find_library
from pathlib import Path

from ring.core.errors import ConfigError

LIBRARY_VARIABLE = "DISAGGKD_LIBUCP"
INSTALL = "pip install -e '.[ucx]' in a clone of DisaggKD"
API_VERSION = (1, 12)
OK, IN_PROGRESS, BUSY = 0, 1, -15
_LAST_ERROR = -100

FEATURE_TAG, FEATURE_WAKEUP = 1 << 0, 1 << 4
PARAM_FEATURES, PARAM_MT_WORKERS_SHARED = 1 << 0, 1 << 5
WORKER_THREAD_MODE, THREAD_MODE_SERIALIZED = 1 << 0, 1
EP_REMOTE_ADDRESS, EP_ERR_MODE, EP_ERR_HANDLER, ERR_MODE_PEER = 1 << 0, 1 << 1, 1 << 2, 1
OP_FLAGS, CLOSE_FORCE = 1 << 4, 1

#: void (*)(void *arg, ucp_ep_h ep, ucs_status_t status)
ErrorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


class Params(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("unused", c_uint64 * 16),
    )


class WorkerParams(ctypes.Structure):
    _fields_ = (("field_mask", c_uint64), ("thread_mode", c_int), ("unused", c_uint64 * 40))


class EndpointParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_callback", ErrorCallback),
        ("err_arg", c_void_p),
        ("unused", c_uint64 * 24),
    )


class RequestParam(ctypes.Structure):
    _fields_ = (("op_attr_mask", c_uint32), ("flags", c_uint32), ("unused", c_uint64 * 24))


class TagInfo(ctypes.Structure):
    _fields_ = (("sender_tag", c_uint64), ("length", c_size_t))


#: (name, result, arguments)
_FUNCTIONS = (
    ("ucp_get_version_string", c_char_p, ()),
    ("ucp_config_read", c_int8, (c_char_p, c_char_p, POINTER(c_void_p))),
    ("ucp_config_modify", c_int8, (c_void_p, c_char_p, c_char_p)),
    ("ucp_config_release", None, (c_void_p,)),
    ("ucp_init_version", c_int8, (c_uint, c_uint, POINTER(Params), c_void_p, POINTER(c_void_p))),
    ("ucp_context_print_info", None, (c_void_p, c_void_p)),
    ("ucp_cleanup", None, (c_void_p,)),
    ("ucp_worker_create", c_int8, (c_void_p, POINTER(WorkerParams), POINTER(c_void_p))),
    ("ucp_worker_destroy", None, (c_void_p,)),
    ("ucp_worker_get_address", c_int8, (c_void_p, POINTER(c_void_p), POINTER(c_size_t))),
    ("ucp_worker_release_address", None, (c_void_p, c_void_p)),
    ("ucp_worker_get_efd", c_int8, (c_void_p, POINTER(c_int))),
    ("ucp_worker_arm", c_int8, (c_void_p,)),
    ("ucp_worker_progress", c_uint, (c_void_p,)),
    ("ucp_ep_create", c_int8, (c_void_p, POINTER(EndpointParams), POINTER(c_void_p))),
    ("ucp_ep_close_nbx", c_void_p, (c_void_p, POINTER(RequestParam))),
    ("ucp_tag_send_nbx", c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, POINTER(RequestParam))),
    ("ucp_tag_probe_nb", c_void_p, (c_void_p, c_uint64, c_uint64, c_int, POINTER(TagInfo))),
    ("ucp_tag_msg_recv_nbx", c_void_p, (c_void_p, c_void_p, c_size_t, c_void_p, POINTER(RequestParam))),
    ("ucp_request_check_status", c_int8, (c_void_p,)),
    ("ucp_request_free", None, (c_void_p,)),
    ("ucs_status_string", c_char_p, (c_int8,)),  # of libucs, which libucp brings along
)


def missing() -> str | None:
    """None: there is a UCX to try; else what to install."""
    if LIBRARY_VARIABLE in os.environ or importlib.util.find_spec("libucx") or find_library("ucp"):
        return None
    return f"there is no UCX: {INSTALL}, or a system UCX"


@functools.cache
def load() -> ctypes.CDLL:
    """libucp. Raises ConfigError: it is missing, or can't be loaded."""
    reason = missing()
    if reason is not None:
        raise ConfigError(f"UCX can't be used: {reason}")
    try:
        library = _open()
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, OSError, AttributeError, StopIteration) as error:
        raise ConfigError(f"UCX can't be loaded ({error}): {INSTALL}, or a system UCX of 1.12 or newer") from error
    return library


def _open() -> ctypes.CDLL:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named is not None:
        # A UCX out of a wheel may bring a libnl-route. If the system's is loaded after it, by a driver, destructors of
        # one end up in the other, and the process dies by SIGSEGV at its very end.
        with contextlib.suppress(OSError):  # the system has none
            ctypes.CDLL("libnl-route-3.so.200")
        return ctypes.CDLL(named)
    prefers_system = os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() not in ("false", "0", "")
    if prefers_system or importlib.util.find_spec("libucx") is None:
        return ctypes.CDLL("libucp.so.0")
    # The wheel knows the order in which its libraries find each other.
    loaded: list[ctypes.CDLL] = importlib.import_module("libucx").load_library()
    return next(library for library in loaded if "libucp." in library._name)


def status_of(pointer: int | None) -> int:
    """Of what a function returned that gives NULL, an error, or a request (IN_PROGRESS)."""
    if not pointer:
        return OK
    status = ctypes.c_int64(pointer).value
    return status if _LAST_ERROR <= status < 0 else IN_PROGRESS


def describe(status: int) -> str:
    """The error in words."""
    return str(load().ucs_status_string(status).decode())


def version() -> tuple[int, int]:
    """Major and minor."""
    major, minor = load().ucp_get_version_string().decode().split(".")[:2]
    return int(major), int(minor)


def why_unsafe(version: tuple[int, int], *, environ: Mapping[str, str], maps: str) -> str | None:
    """Why a UCX of this version would end the process by SIGSEGV one day; None: it would not.

    Before 1.22 it does when a fetch is given up and it may not watch the memory of the process: because a variable says
    so, or because another UCX watches it. maps: as in /proc/self/maps."""
    if version >= (1, 22):
        return None
    if environ.get("UCX_MEM_EVENTS", "y").lower() in ("n", "no", "0", "off"):
        return f"UCX_MEM_EVENTS={environ['UCX_MEM_EVENTS']}"
    watchers = sorted({line.split()[-1] for line in maps.splitlines() if re.search(r"/libucm[-.]", line)})
    return f"two of it in this process ({', '.join(watchers)})" if len(watchers) > 1 else None


def path() -> str:
    """Of the file that libucp was loaded from."""
    load()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libucp" in line:
            return line.split(maxsplit=5)[5]
    return "unknown"


def has_module(name: str) -> bool:
    """Whether this build of UCX can use those devices (ib: verbs, cuda), be there any or not."""
    modules = Path(path()).parent / "ucx"
    return any(modules.glob(f"libuct_{name}.so*")) or any(modules.glob(f"libuct_{name}-*.so*"))
