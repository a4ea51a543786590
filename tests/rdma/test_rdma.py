"""UCX over verbs: the transport contract, a distillation, a teacher's end; and that the bytes went over RDMA."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.rdma.devices import MAX_PACKET_BYTES, RC, STUDENT, TEACHER, UD, env, packets
from tests.ucx.conftest import NUM_STEPS, REPOSITORY, Inputs, Start, curve, serve, train, transports
from transport import registry

#: Emulated, and one of two cores: minutes where seconds are usual.
SUITE_TIMEOUT_S = 900


def conformance(tls: str, *options: str) -> str:
    """The suite, the test's side on one device and its peers on the other; returns its output."""
    settings = {**env(tls, STUDENT), "DISAGGKD_PEER_NET_DEVICES": TEACHER, "PYTHONPATH": str(REPOSITORY)}
    suite = [*sorted(map(str, (REPOSITORY / "tests" / "transport").glob("test_conformance*.py"))), "--backend=ucx"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=400", *suite, *options],
        cwd=REPOSITORY,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    return run.stdout


def test_ucx_sees_rdma_and_says_so() -> None:
    assert registry.load("ucx").capabilities().rdma
    assert "ucx+rdma" in registry.offered("auto")


def test_a_distillation_over_rc_has_the_curve_of_shm_to_the_bit(start: Start, inputs: Inputs) -> None:
    _, endpoint = serve(start, inputs, env=env(RC, TEACHER))
    runs, sent = {}, {}
    for name in ("shm", "ucx"):
        before = packets()
        runs[name] = train(start, inputs, "--teacher", endpoint, "--transport", name, name=name, env=env(RC, STUDENT))
        assert runs[name].wait() == 0, runs[name].log
        assert transports(runs[name]) == [name]
        sent[name] = packets() - before
    assert len(curve(runs["ucx"])) == NUM_STEPS
    assert curve(runs["ucx"]) == curve(runs["shm"])
    num_rows = sum(step["rows"] for step in curve(runs["ucx"]))
    assert sent["ucx"] - sent["shm"] >= num_rows * 48 * 4 / MAX_PACKET_BYTES  # states of 48 fp32 values


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_ends_with_exit_3_when_its_teacher_is_killed_or_stopped(
    start: Start, inputs: Inputs, number: signal.Signals
) -> None:
    teacher, endpoint = serve(start, inputs, env=env(RC, TEACHER))
    student = train(
        start,
        inputs,
        *("--teacher", endpoint, "--transport", "ucx", "--steps", 100_000),
        *("--peer-timeout", 3, "--teacher-timeout", 1),
        name="student",
        env=env(RC, STUDENT),
    )
    metrics = student.cwd / "out" / "metrics.jsonl"
    student.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3, "step 3")
    teacher.process.send_signal(number)
    assert student.wait() == 3, student.log


def test_the_contract_holds_over_rc_and_its_bytes_are_sent_by_the_devices() -> None:
    before = packets()
    assert " passed" in conformance(RC)
    # Among others T6 moves 64 MiB.
    assert (packets() - before) * MAX_PACKET_BYTES >= 64 << 20


def test_payloads_and_fences_hold_over_ud() -> None:
    assert " passed" in conformance(UD, "-k", "test_t1 or test_t5 or test_t9_a_payload")


def test_payloads_are_intact_when_one_packet_in_a_hundred_is_lost() -> None:
    for device in ("v0", "v1"):
        subprocess.run(["tc", "qdisc", "add", "dev", device, "root", "netem", "loss", "1%"], check=True)
    try:
        assert " passed" in conformance(RC, "-k", "test_t1_payload or test_t5_the_source")
    finally:
        for device in ("v0", "v1"):
            subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)
