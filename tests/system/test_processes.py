"""What the tests of whole commands stand on: commands that start at one time, and ports that are named beforehand."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port
from tests.system.processes import REPOSITORY, Command, Teacher

YEARS = (2024, 2025, 2026)


def test_commands_that_start_at_one_time_have_logs_of_their_own(tmp_path: Path) -> None:
    commands = [Command("calendar", year, cwd=tmp_path) for year in YEARS]
    for command, year in zip(commands, YEARS, strict=True):
        command.succeed()
        assert [other for other in YEARS if f" {other}\n" in command.output] == [year]
    assert len({command.error_file for command in commands}) == len(YEARS)


def test_teachers_that_start_at_one_time_are_not_ready_for_each_other(tmp_path: Path) -> None:
    teachers = [Teacher(tmp_path / "absent", cwd=tmp_path, wait=False, command=("calendar", "-h")) for _ in YEARS]
    assert len({teacher._ready_file for teacher in teachers}) == len(YEARS)
    for teacher in teachers:
        teacher.wait()


def test_a_port_is_given_once_and_never_by_chance_to_anybody_else() -> None:
    first_by_chance = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(free_port()) + 1))
        taken.listen()
        ports = [int(free_port()) for _ in range(50)]
        assert taken.getsockname()[1] not in ports
    assert len(set(ports)) == 50
    assert max(ports) < min(first_by_chance, 32768)


def test_two_workers_of_a_session_give_different_ports() -> None:
    code = "from tests.ports import free_port; print(*[free_port() for _ in range(50)])"
    given: list[set[str]] = []
    for worker in ("gw0", "gw1"):
        env = os.environ | {"PYTEST_XDIST_WORKER": worker}
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True, text=True)
        given.append(set(ended.stdout.split()))
    assert [len(ports) for ports in given] == [50, 50]
    assert not given[0] & given[1]
