"""Which backend a channel gets, and what is said when the wish can't be fulfilled."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from ring.core.errors import ConfigError
from transport import registry, shm, ucx, ucx_core, ucx_library

BOTH = {"student_backends": ("shm", "zmq"), "teacher_backends": ("shm", "zmq")}


def test_auto_takes_the_best_that_both_can_do_and_says_why_not_the_better() -> None:
    assert registry.choose("auto", **BOTH, same_host=True)[0] == "shm"
    name, reason = registry.choose("auto", **BOTH, same_host=False)
    assert name == "zmq"
    assert "shm" in reason
    assert "same host" in reason
    name, reason = registry.choose("auto", student_backends=("zmq",), teacher_backends=("shm", "zmq"), same_host=True)
    assert name == "zmq"
    assert "student" in reason


def test_auto_takes_local_only_where_both_sides_offer_it() -> None:
    ways = {"student_backends": ("local", "shm"), "teacher_backends": ("local", "shm")}
    assert registry.choose("auto", **ways, same_host=True)[0] == "local"
    assert "local" not in registry.available()
    assert registry.available(same_process=True)[0] == "local"


def test_auto_takes_ucx_where_both_sides_have_rdma() -> None:
    with_rdma, without = ("shm", "ucx", "zmq", "ucx+rdma"), ("shm", "ucx", "zmq")
    name, reason = registry.choose("auto", student_backends=with_rdma, teacher_backends=with_rdma, same_host=False)
    assert name == "ucx"
    assert "not shm" in reason
    assert registry.choose("auto", student_backends=with_rdma, teacher_backends=with_rdma, same_host=True)[0] == "shm"
    name, reason = registry.choose("auto", student_backends=with_rdma, teacher_backends=without, same_host=False)
    assert name == "zmq"
    assert "ucx (there is no RDMA device on both sides" in reason


def test_auto_takes_ucx_without_rdma_only_when_nothing_else_is_left() -> None:
    name, reason = registry.choose(
        "auto", student_backends=("shm", "ucx", "zmq"), teacher_backends=("ucx",), same_host=True
    )
    assert name == "ucx"
    assert "nothing else is left" in reason


def test_what_is_offered_says_where_rdma_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ucx+rdma" not in registry.offered("auto")  # there is no such device here
    capabilities = ucx.capabilities()
    monkeypatch.setattr(ucx, "capabilities", lambda: dataclasses.replace(capabilities, rdma=True))
    assert registry.offered("ucx") == ("ucx", "ucx+rdma")
    assert registry.offered("auto")[-1] == "ucx+rdma"


def test_auto_does_without_a_ucx_that_can_not_be_loaded_though_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucx, "rdma_devices", lambda: ["mlx5_0:1"])
    monkeypatch.setenv("DISAGGKD_LIBUCP", "/nonexistent/libucp.so")
    monkeypatch.setattr(ucx_core, "_contexts", {})
    ucx_library.load.cache_clear()
    try:
        assert registry.offered("auto") == ("shm", "zmq")
        assert "transport ucx is left out of auto: UCX can't be loaded (/nonexistent/libucp.so" in caplog.text
        with pytest.raises(ConfigError, match="can't be loaded"):
            registry.offered("ucx")
    finally:
        ucx_library.load.cache_clear()


def test_auto_without_a_common_backend_names_each_and_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"not shm \(.*, not zmq \("):
        registry.choose("auto", student_backends=("shm",), teacher_backends=("zmq",), same_host=True)


def test_a_requested_backend_is_taken_or_refused_never_replaced() -> None:
    assert registry.choose("zmq", **BOTH, same_host=True) == ("zmq", "it was asked for")
    with pytest.raises(ConfigError, match="'shm' was asked for, but the two sides are not on the same host"):
        registry.choose("shm", **BOTH, same_host=False)
    with pytest.raises(ConfigError, match="the teacher can't use it: it has zmq"):
        registry.choose("shm", student_backends=("shm",), teacher_backends=("zmq",), same_host=True)


@pytest.mark.parametrize("name", ["rdma", "", "SHM", "fault"])
def test_an_unknown_backend_is_refused_with_what_is_allowed_and_installed(name: str) -> None:
    for use in (registry.load, registry.unavailable, lambda name: registry.choose(name, **BOTH, same_host=True)):
        with pytest.raises(ConfigError, match=r"allowed: auto, local, shm, ucx, zmq; installed: local, shm, ucx, zmq"):
            use(name)


def test_a_backend_that_can_not_run_here_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "unavailable", lambda: "libthing is missing: pip install 'disaggkd[thing]'")
    assert registry.available() == ("ucx", "zmq")
    with pytest.raises(ConfigError, match=r"pip install 'disaggkd\[thing\]'"):
        registry.load("shm")
    with pytest.raises(ConfigError, match=r"pip install 'disaggkd\[thing\]'"):
        registry.choose("shm", student_backends=registry.available(), teacher_backends=("shm",), same_host=True)


@pytest.mark.parametrize("name", registry.names(same_process=True))
def test_every_registered_backend_loads_and_goes_by_its_name(name: str) -> None:
    assert registry.load(name).capabilities().name == name


def test_processes_of_one_user_on_one_host_have_the_same_host_id() -> None:
    code = "from transport.registry import host_id; print(host_id())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == registry.host_id()


@pytest.mark.parametrize("kind", ["mnt", "pid", "user"])
def test_another_namespace_is_another_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, readlink = registry.host_id(), os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: readlink(path) + "0" * str(path).endswith(kind))
    assert registry.host_id() != here


def test_another_user_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = registry.host_id()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert registry.host_id() != here
