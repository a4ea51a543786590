"""`disaggkd keys` and the directories that it makes: private, complete, never overwritten, and read with suspicion."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from bench.cli import main
from ring import auth
from ring.auth import MAX_PEERS, Keyring, load_keyring, make_keyrings
from ring.core.errors import ConfigError
from tests.limits import descriptors_below
from tests.rights import needs_root


@pytest.fixture(autouse=True)
def lenient_umask() -> object:
    """The modes must not depend on it."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def teacher(tmp_path: Path) -> Keyring:
    made, _ = make_keyrings(tmp_path / "keys", ("teacher", "student"))
    return made


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_command_makes_two_sides_that_trust_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    teacher, student = (load_keyring(tmp_path / "keys" / side) for side in ("teacher", "student"))
    assert teacher.peers() == {student.public: "student.pub"}
    assert student.peers() == {teacher.public: "teacher.pub"}
    said = capsys.readouterr().out
    assert f"--auth {teacher.directory}" in said
    assert teacher.public.decode() in said
    for keyring in (teacher, student):
        assert keyring.secret.decode() not in said
        assert keyring.secret.decode() not in repr(keyring)


def test_secrets_are_for_their_owner_only_whatever_the_umask(tmp_path: Path, teacher: Keyring) -> None:
    assert mode_of(tmp_path / "keys") == 0o700
    for side in ("teacher", "student"):
        directory = tmp_path / "keys" / side
        assert sorted(path.name for path in directory.iterdir()) == ["peers", "public.key", "secret.key"]
        assert mode_of(directory) == 0o700
        assert mode_of(directory / "secret.key") == 0o600
        assert mode_of(directory / "public.key") == 0o644
        secret = (directory / "secret.key").read_bytes().strip()
        public = (directory / "public.key").read_bytes().strip()
        assert zmq.curve_public(secret) == public


@pytest.mark.parametrize("present", ["teacher", "student"])
def test_keys_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], present: str) -> None:
    """Not even half of them."""
    assert main(["keys", str(tmp_path), "--only", present]) == 0
    before = (tmp_path / present / "secret.key").read_bytes()
    assert main(["keys", str(tmp_path)]) == 2
    assert f"{tmp_path / present}: there already" in capsys.readouterr().err
    assert (tmp_path / present / "secret.key").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [present]


def test_keys_are_made_for_all_sides_or_for_none(tmp_path: Path) -> None:
    """One side's place turns out to be taken by what nobody saw before."""
    taken = tmp_path / "student"
    taken.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="can't be written"):
        make_keyrings(tmp_path, ("teacher", "student"))
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("num_written", range(6))
def test_keys_that_could_not_be_written_leave_no_secret_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """Not even if there is no descriptor left to look for it."""
    calls = 0

    def write_key(path: Path, key: bytes, *, mode: int) -> None:
        nonlocal calls
        if calls == num_written:
            shortage.enter_context(descriptors_below(0))
        calls += 1
        write(path, key, mode=mode)

    write = auth._write_key
    monkeypatch.setattr(auth, "_write_key", write_key)
    with ExitStack() as shortage, pytest.raises(ConfigError, match="can't be written: Too many open files"):
        make_keyrings(tmp_path, ("teacher", "student"))
    assert list(tmp_path.rglob("*")) == []


def test_one_side_alone_says_where_the_others_key_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path), "--only", "student"]) == 0
    where = tmp_path / "student" / "peers" / "teacher.pub"
    assert f"copy the teacher's public.key to {where}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds no key, so that nobody could be trusted"):
        load_keyring(tmp_path / "student")
    where.write_bytes(zmq.curve_keypair()[0])
    where.chmod(0o644)
    assert list(load_keyring(tmp_path / "student").peers().values()) == ["teacher.pub"]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--only", "both"]])
def test_bad_usage_ends_with_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_needs_no_torch() -> None:
    code = "import sys, bench.cli\ntry: bench.cli.main(['keys', '--help'])\nexcept SystemExit: pass"
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("path", "mode", "said"),
    [
        ("secret.key", 0o640, r"secret\.key has mode 0640, which lets others in; allowed: `chmod go= .*secret\.key`"),
        ("secret.key", 0o604, "has mode 0604"),
        (".", 0o770, "has mode 0770.*chmod go-w"),
        ("peers", 0o757, "has mode 0757.*chmod go-w"),
        ("peers/student.pub", 0o664, "has mode 0664"),
    ],
)
def test_keys_that_others_could_read_or_change_are_refused(teacher: Keyring, path: str, mode: int, said: str) -> None:
    (teacher.directory / path).chmod(mode)
    with pytest.raises(ConfigError, match=said):
        load_keyring(teacher.directory)


@needs_root
def test_keys_of_another_user_are_refused(teacher: Keyring) -> None:
    os.chown(teacher.directory / "peers" / "student.pub", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345; allowed: user 0"):
        load_keyring(teacher.directory)


GOOD = zmq.curve_keypair()[0]


NO_KEYS = (
    *(b"", b"\n", GOOD[:39], GOOD + b"a", GOOD + b"\n" + GOOD, b"\xff" * 40, b" " * 40, b"%" * 40, b"# " + GOOD),
    bytes(5000),
)


@pytest.mark.parametrize("text", NO_KEYS, ids=range(len(NO_KEYS)))
def test_what_is_no_key_is_refused_and_not_shown(teacher: Keyring, text: bytes) -> None:
    for name in ("secret.key", "peers/student.pub"):
        whole = (teacher.directory / name).read_bytes()
        (teacher.directory / name).write_bytes(text)
        with pytest.raises(ConfigError, match="holds no key; allowed: one line of 40 characters") as raised:
            load_keyring(teacher.directory)
        assert not text.strip() or text.strip().decode(errors="replace") not in str(raised.value)
        (teacher.directory / name).write_bytes(whole)


def test_comments_and_other_files_beside_a_key_are_no_matter(teacher: Keyring) -> None:
    name = teacher.directory / "peers" / "student.pub"
    name.write_bytes(b"# trainer 7, until March\n\n" + name.read_bytes())
    (teacher.directory / "peers" / "README").write_text("whose keys these are")
    assert list(load_keyring(teacher.directory).peers().values()) == ["student.pub"]


def test_the_number_of_keys_is_bounded(teacher: Keyring) -> None:
    for number in range(MAX_PEERS):
        (teacher.directory / "peers" / f"{number}.pub").touch()
    with pytest.raises(ConfigError, match=f"holds {MAX_PEERS + 1} keys; allowed: {MAX_PEERS}"):
        teacher.peers()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no such directory"),
        ("keys", r"no secret\.key in it: it is in .*keys/student and .*keys/teacher; allowed: a directory of one side"),
        ("keys/teacher/secret.key", "no such directory"),
    ],
)
def test_a_directory_that_is_none_is_said(tmp_path: Path, teacher: Keyring, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"--auth .*{said}"):
        load_keyring(tmp_path / name)
