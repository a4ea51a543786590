"""A process that has imported what the commands need, and forks a child for every command that a test starts.

The child runs the command as `python -m` would, as a process like any other: its own pid, memory, signals and exit
code. It only saves the seconds that every start spends on importing torch, transformers and datasets.

Requests come as JSON lines on stdin ({"module", "arguments", "cwd", "out", "error"}; also "env", variables to set, and
"namespaces", paths of Linux namespaces to enter), answers go to stdout: {"pid"} for each request in turn, and {"pid",
"code"} when a child has ended, negative for a signal. When stdin ends, so do the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import sys
from typing import Any


def preload() -> None:
    """Everything heavy, and not the modules that are run: those must be fresh in the child."""
    import datasets  # noqa: F401 - importing it is the purpose
    import transformers

    import student.train.run  # noqa: F401
    import teacher.load
    import teacher.service  # noqa: F401

    # transformers imports these when they are first named.
    _ = transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.Qwen3ForCausalLM


def run_child(request: dict[str, Any]) -> None:
    """Never returns."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite that runs under nohup ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path in request["namespaces"]:
        enter_namespace(path)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["error"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        fd = os.open(name, flags, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = [request["module"], *request["arguments"]]
    code: object = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - what an interpreter does at its end
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def enter_namespace(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):  # os.setns came with Python 3.12
        raise OSError(ctypes.get_errno(), f"{path} can't be entered")
    os.close(fd)


def serve() -> None:
    wake_fd, signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(signal_fd)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the tests; the end of stdin follows
    children: set[int] = set()
    requests = b""
    while True:
        ready, _, _ = select.select([0, wake_fd], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(wake_fd, 4096)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _answer({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if 0 not in ready:
            continue
        received = os.read(0, 65536)
        if not received:
            break
        *lines, requests = (requests + received).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                run_child(json.loads(line))
            children.add(pid)
            _answer({"pid": pid})
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(answer: dict[str, int]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    preload()
    _answer({"pid": os.getpid()})
    serve()
