"""`disaggkd doctor`: what it finds, what it says is bad, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import cli, doctor
from transport import devices, ucx_library


def findings(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = cli.main(["doctor", "--json", *flags])
    return code, {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}


def make_device(root: Path, name: str, state: str, gids: dict[int, str]) -> None:
    port = root / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text(state)
    for index, gid in gids.items():
        (port / "gids" / str(index)).write_text(gid)


def test_a_machine_without_rdma_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, "--seconds", "0")
    assert code == 0
    assert found["transport ucx"]["verdict"] == "good"
    assert "tcp/lo" in found["UCX transports"]["found"]
    assert found["UCX with verbs"]["found"] == "not compiled in"
    assert ucx_library.LIBRARY_VARIABLE in found["UCX with verbs"]["remedy"]
    assert found["RDMA devices"]["found"] == "none"


def test_an_rdma_device_that_can_not_be_used_is_bad_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_device(tmp_path, "mlx5_0", "4: ACTIVE", {0: "fe80:0000:0000:0000:0000:0000:0000:0001"})
    make_device(tmp_path, "mlx5_1", "1: DOWN", {})
    for module in (doctor, devices):
        monkeypatch.setattr(module, "INFINIBAND", tmp_path)
    monkeypatch.setenv("UCX_IB_GID_INDEX", "3")
    code, found = findings(capsys, "--seconds", "0")
    assert code == 1
    assert found["RDMA device mlx5_0"]["found"] == "active ports: mlx5_0:1"
    assert found["RDMA device mlx5_1"]["verdict"] == "bad"
    assert "UCX_IB_GID_INDEX" in found["GID of mlx5_0:1"]["remedy"]
    assert found["UCX with verbs"]["verdict"] == "bad"  # the wheel has none


def test_every_transport_that_can_run_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, "--seconds", "0.05")
    assert code == 0
    for name in ("shm", "ucx", "zmq"):
        assert found[f"loopback {name}"]["found"].endswith("GB/s")


def test_what_is_missing_is_said_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_library, "missing", lambda: "there is no UCX: pip install -e '.[ucx]' in a clone")
    code, found = findings(capsys, "--seconds", "0")
    assert code == 0
    assert found["transport ucx"]["found"] == "can't run"
    assert "pip install -e '.[ucx]' in a clone" in found["transport ucx"]["remedy"]


def test_bad_usage_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--seconds", "100"]) == 2
    assert "0 to 60" in capsys.readouterr().err
