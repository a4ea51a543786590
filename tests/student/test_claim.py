"""--out belongs to one run at a time, and a run that never began leaves nothing there."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ring.core.errors import ConfigError
from student.checkpoint import CheckpointError
from student.train.claim import claimed
from tests.leaks import expect_no_more, held
from tests.limits import files_below

NUM_RUNS, CLAIMS_A_RUN = 4, 100


def test_a_directory_is_one_runs_at_a_time_though_each_removes_its_lock(tmp_path: Path) -> None:
    """Whoever opens the lock just before it is removed must not take the file without a name for it."""
    root, mark = tmp_path / "out", tmp_path / "mark"
    root.mkdir()
    num_claims: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        count = 0
        try:
            while count < CLAIMS_A_RUN:
                try:
                    with claimed(root):
                        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # FileExistsError: somebody else is here too
                        mark.unlink()
                        count += 1
                except ConfigError as error:
                    assert "another run is writing there" in str(error)  # noqa: PT017 - most claims are refused
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        num_claims.append(count)

    threads = [threading.Thread(target=run) for _ in range(NUM_RUNS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert num_claims == [CLAIMS_A_RUN] * NUM_RUNS
    assert list(root.iterdir()) == []


def test_a_run_that_never_began_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), claimed(tmp_path / "new" / "out"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="refused"), claimed(tmp_path / "out"):
        raise ValueError("refused")
    assert list((tmp_path / "out").iterdir()) == []
    with claimed(tmp_path / "new" / "out"):
        (tmp_path / "new" / "out" / "run.json").write_text("{}")
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == ["run.json"]


def test_a_lock_that_a_killed_run_left_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("of a former life")
    with claimed(tmp_path, "mine"):
        assert (tmp_path / ".lock").read_text() == "mine"


def test_a_run_whose_directory_was_taken_away_leaves_what_has_its_name_alone(tmp_path: Path) -> None:
    out, aside = tmp_path / "out", tmp_path / "aside"
    with claimed(out, "first") as first:
        first.check()
        out.rename(aside)
        with pytest.raises(CheckpointError, match="was moved or removed"):
            first.check()
        with claimed(out, "second") as second, ExitStack() as nested:
            second.check()
            with pytest.raises(CheckpointError, match="was moved or removed"):
                first.check()
            nested.enter_context(pytest.raises(ConfigError, match="another run is writing there"))
            nested.enter_context(claimed(aside))
        assert not out.exists()
    assert [path.name for path in aside.iterdir()] == [".lock"]


def test_a_lock_that_was_cleaned_away_is_taken_again(tmp_path: Path) -> None:
    """As a service does to files that nobody has touched for weeks."""
    with claimed(tmp_path, "mine") as claim:
        (tmp_path / ".lock").unlink()
        claim.check()
        assert (tmp_path / ".lock").read_text() == "mine"
        with pytest.raises(ConfigError, match="another run is writing there"), claimed(tmp_path):
            pytest.fail("claimed twice")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_run_has_taken_meanwhile_is_its_own(tmp_path: Path) -> None:
    with claimed(tmp_path, "first") as first:
        (tmp_path / ".lock").unlink()
        with claimed(tmp_path, "second"):
            with pytest.raises(CheckpointError, match=r"another run is writing there.*this run's lock was removed"):
                first.check()
            assert (tmp_path / ".lock").read_text() == "second"


def test_each_look_keeps_the_lock_young(tmp_path: Path) -> None:
    with claimed(tmp_path) as claim:
        os.utime(tmp_path / ".lock", (0, 0))
        claim.check()
        assert (tmp_path / ".lock").stat().st_mtime > 0


def test_a_directory_made_by_somebody_else_is_not_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out):
        out.rename(tmp_path / "aside")
        out.mkdir()
    assert out.exists()


def test_a_disk_without_room_for_the_lock_is_refused(tmp_path: Path) -> None:
    before = held()
    with (
        files_below(0),
        pytest.raises(ConfigError, match="File too large; allowed: a directory that can be written"),
        claimed(tmp_path, "word"),
    ):
        pytest.fail("claimed")
    expect_no_more(held, before)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000])
def test_a_name_that_is_too_long_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="File name too long"), claimed(tmp_path / name):
        pytest.fail("claimed")


def test_a_lock_is_removed_by_its_own_run_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(claimed(out))
        out.rename(tmp_path / "aside")
        second.enter_context(claimed(out, "second"))
        first.close()
        assert (out / ".lock").read_text() == "second"


def test_a_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"--out .*; allowed: a directory that can be written"),
        claimed(tmp_path / "file" / "out"),
    ):
        pytest.fail("claimed")
