"""What sets machines up: the Makefile's stamps, and how the virtual machine's parts are had or missed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Those that the script looks for, and those that would change this machine.
PROGRAMS = ["qemu-system-x86_64", "busybox", "modprobe", "cpio", "ip", "rdma", "tc", "mkfs.erofs", "dpkg-deb", "depmod"]
UBUNTU = """\
[ "$2" = linux-image-generic ] || { echo "E: No packages found" >&2; exit 100; }
echo "  Depends: linux-image-6.8.0-90-generic"
echo "  Depends: linux-modules-extra-6.8.0-90-generic"
"""


@pytest.mark.parametrize(("target", "extra"), [("test-slow", "triton"), ("demo-smollm", "smollm")])
def test_what_is_installed_already_is_not_asked_for_again(tmp_path: Path, target: str, extra: str) -> None:
    """Without a network, what was set up once works on."""

    def commands() -> str:
        dry = ["make", "-n", target, f"VENV={tmp_path}", f"PYTHON={sys.executable}"]
        return subprocess.run(dry, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def stamp(name: str) -> None:
        (tmp_path / name).touch()
        later_s = time.time() + 1000  # than any file of the checkout
        os.utime(tmp_path / name, (later_s, later_s))

    assert "pip install" in commands()
    stamp(".setup-stamp")
    assert f"[{extra}]" in commands()
    stamp(f".extra-{extra}")
    assert "pip install" not in commands()


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the virtual machine is x86-64 Linux"
)
@pytest.mark.parametrize(
    ("apt_cache", "said"),
    [
        ("exit 100", "apt knows no linux-image-amd64 or linux-image-generic"),
        (
            UBUNTU,
            "could not download linux-image-6.8.0-90-generic linux-modules-6.8.0-90-generic "
            "linux-modules-extra-6.8.0-90-generic",
        ),
    ],
    ids=["lists of nothing", "Ubuntu's names"],
)
def test_a_kernel_that_can_not_be_had_is_said_in_a_line(tmp_path: Path, apt_cache: str, said: str) -> None:
    asked = tmp_path / "asked"
    scripts = dict.fromkeys(PROGRAMS, "exit 0")
    scripts |= {"id": "echo 0", "apt-cache": apt_cache}
    scripts["apt-get"] = f'echo "$*" >>{asked}; [ "$2" != download ]'
    (tmp_path / "bin").mkdir()
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    ended = subprocess.run(
        [bash, "tests/rdma/prepare.sh"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "DISAGGKD_RDMA_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 75, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"test-rdma: nothing was tested: {said}")
    assert "-qq update" in asked.read_text().splitlines(), "its lists may be old, or missing"
