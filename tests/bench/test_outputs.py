"""Where records and pictures go is tried before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import bench_core, bench_kd_loss, bench_pipeline, bench_ranks, bench_transport
from bench.outputs import check_outputs
from ring.core.errors import ConfigError

BENCHES = [bench_core, bench_kd_loss, bench_ranks, bench_transport]


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.PROG)
@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("picture.nonsense", "no kind of picture; allowed: a file that ends in "),
        ("picture", "no kind of picture"),
        ("file/picture.png", "can't be written: "),
        ("directory.png", "can't be written; allowed: a file"),
    ],
)
def test_a_picture_that_cannot_be_drawn_costs_no_measurement(
    bench: object, picture: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory.png").mkdir()
    out = tmp_path / "records"
    assert bench.main(["--plot", str(tmp_path / picture), "--out", str(out)]) == 2  # type: ignore[attr-defined]
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert f"--plot {tmp_path / picture}: {said}" in line
    assert printed.out == ""
    assert not out.exists()


@pytest.mark.parametrize("bench", [*BENCHES, bench_pipeline], ids=lambda bench: bench.PROG)
def test_records_that_cannot_be_written_cost_no_measurement(
    bench: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert bench.main(["--out", str(out)]) == 2  # type: ignore[attr-defined]
        assert f"--out {out}: can't be written: " in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_and_records_are_not(tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')\n")
    code = "import sys; from bench.outputs import check_outputs; check_outputs(out=sys.argv[1], plot=sys.argv[2])"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def ends_with(plot: str) -> str:
        command = [sys.executable, "-c", code, str(tmp_path / "records"), plot]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr

    assert ends_with("") == ""
    assert "--plot needs matplotlib; pip install" in ends_with("picture.png")


def test_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("a picture")
    check_outputs(out=str(tmp_path / "records"), plot=str(tmp_path / "old.svg"))
    check_outputs(out=str(tmp_path / "records"), plot=str(tmp_path / "new" / "picture.PNG"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "old.svg", "records"]
    assert (tmp_path / "old.svg").read_text() == "a picture"
    with pytest.raises(ConfigError, match="--out /proc/nowhere: can't be written"):
        check_outputs(out="/proc/nowhere")
