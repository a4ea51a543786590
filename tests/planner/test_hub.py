"""A model of the hub: from the cache or the network, and a word within seconds where neither has it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from planner import hub


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one model in it; the hub may be asked."""
    revision = "0" * 40
    repository = tmp_path / "models--owner--cached"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


@pytest.fixture(params=["refuses", "is silent"])
def unreachable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub that nobody gets an answer from."""
    monkeypatch.setenv(hub.TIMEOUT_VARIABLE, "1")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            server.listen()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield endpoint


def test_a_hub_that_can_not_be_reached_is_said_at_once_in_one_line(cache: Path, unreachable: str) -> None:
    with pytest.raises(ValueError, match="can't be reached") as refusal:
        hub.is_only_cached("owner/absent")
    message = str(refusal.value)
    assert str(cache) in message
    assert unreachable in message
    assert "allowed: a checkpoint directory, or a hub id" in message
    assert "\n" not in message


def test_what_is_cached_is_used_without_the_hub_and_said(unreachable: str, caplog: pytest.LogCaptureFixture) -> None:
    assert hub.is_only_cached("owner/cached")
    assert f"{unreachable} can't be reached" in caplog.text
    assert "owner/cached is taken from the cache" in caplog.text


def test_offline_nobody_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.is_only_cached("owner/cached")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids to ask"):
        hub.is_only_cached("owner/absent")


def test_a_hub_that_answers_is_left_to_say_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nX-Error-Code: RepoNotFound\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        assert not hub.is_only_cached("owner/absent")
        thread.join()
