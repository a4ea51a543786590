"""What a demo or report empties and deletes is its own: anything else under --out stays, and stops it at its start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.bench_report import main as report
from bench.claimed import MARK, claim, claim_out, is_made, is_ours, remove, renew
from examples.demo.__main__ import main as demo
from examples.demo_cluster import main as cluster
from ring.core.errors import ConfigError


def everything(root: Path) -> dict[str, str | None]:
    """Names below `root`, with what files say."""
    paths = sorted(root.rglob("*"))
    return {str(path.relative_to(root)): path.read_text() if path.is_file() else None for path in paths}


def precious(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_text("months of work")
    return directory


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (demo, ("kd", "ce", "teacher", "teacher-run", "student", "corpus")),
        (cluster, ("cluster", "teacher", "replica-1")),
        (report, ("curves", "pace", "memory", "transport", "teacher", "teacher-run", "student")),
    ],
    ids=["demo", "demo-cluster", "report"],
)
def test_what_a_command_did_not_make_stops_it_before_anything_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int], names: tuple[str, ...]
) -> None:
    for name in names:
        out = tmp_path / f"out-{name}"
        precious(out / name)
        claim(out / "kd-of-mine")
        (out / "teacher-recipe.json").write_text("{}")
        before = everything(out)
        assert command(["--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--out {out}: {out / name} holds something" in line
        assert "allowed: another --out" in line
        assert everything(out) == before


def test_a_file_of_a_name_that_is_written_is_no_more_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("mine")
    for command in (demo, report):
        assert command(["--out", str(tmp_path)]) == 2
        assert f"{tmp_path / 'report.json'} is there" in capsys.readouterr().err
    assert everything(tmp_path) == {"report.json": "mine"}
    assert demo(["--out", str(tmp_path / "report.json")]) == 2
    assert "no directory" in capsys.readouterr().err


def test_a_second_command_finds_the_first_ones_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        claim_out(out, directories=("kd", "teacher"), files=("summary.txt",))
        (out / "summary.txt").write_text("ours")
        for name in ("kd", "teacher"):
            renew(out / name)
            (out / name / "step-1").mkdir()
            (out / name / "step-1" / "weights").write_text("ours")
    renew(out / "kd")
    assert everything(out / "kd").keys() == {MARK}
    remove(out / "teacher")
    remove(out / "teacher")
    assert not (out / "teacher").exists()


def test_an_empty_directory_is_anybodys_and_a_link_nobodys(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert is_ours(tmp_path / "empty")
    assert not is_made(tmp_path / "empty")
    claim(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("link", "broken"):
        with pytest.raises(ConfigError, match=f"{name} holds something"):
            renew(tmp_path / name)
    for refused in (remove, renew, claim):
        with pytest.raises(ConfigError, match="mine holds something"):
            refused(tmp_path / "mine" if (tmp_path / "mine").exists() else precious(tmp_path / "mine"))
    assert (tmp_path / "mine" / "model.safetensors").read_text() == "months of work"


def test_what_a_link_in_an_own_directory_leads_to_is_not_deleted_with_it(tmp_path: Path) -> None:
    mine = precious(tmp_path / "mine")
    renew(tmp_path / "kd")
    (tmp_path / "kd" / "model").symlink_to(mine)
    renew(tmp_path / "kd")
    assert everything(tmp_path / "kd").keys() == {MARK}
    assert (mine / "model.safetensors").read_text() == "months of work"
