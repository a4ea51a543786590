"""Ranks of one trainer as real processes, started as torchrun starts them, but forked from the tests' zygote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.system.processes import Command, Student


class World:
    """`student.train` on several ranks, with one --out."""

    def __init__(
        self,
        *arguments: object,
        size: int,
        out: Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
        run_id: str = "none",
        **where: Any,
    ) -> None:
        port = free_port()
        self.out = out
        self.ranks = [
            Student(
                *arguments,
                out=out,
                cwd=_own_directory(cwd, rank),
                env={**variables_of(rank, size, port, restarts=restarts, run_id=run_id), **(env or {})},
                **where,
            )
            for rank in range(size)
        ]

    def __iter__(self) -> Iterator[Student]:
        return iter(self.ranks)

    @property
    def first(self) -> Student:
        return self.ranks[0]

    @property
    def summary(self) -> dict[str, Any]:
        return self.first.summary

    def until_step(self, step: int) -> None:
        self.first.until_step(step)

    def wait(self) -> list[int]:
        """The exit codes."""
        return [rank.wait() for rank in self.ranks]

    def succeed(self) -> None:
        codes = self.wait()
        assert not any(codes), f"exit {codes}:\n{self.tail()}"

    def tail(self) -> str:
        return "\n".join(f"--- rank {place}\n{rank.tail()}" for place, rank in enumerate(self.ranks))

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


def variables_of(rank: int, size: int, port: str, *, restarts: int = 0, run_id: str = "none") -> dict[str, str]:
    """What torchrun tells a process on one machine. run_id: its --rdzv-id."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id,
    }


def run_steps(size: int, *, family: str | None, out: Path, cwd: Path) -> list[Command]:
    """`tests.ranks.steps` on so many ranks, in every way of a family, or briefly."""
    return run_ranks("tests.ranks.steps", family or "briefly", out, size=size, cwd=cwd)


def run_ranks(module: str, *arguments: object, size: int, cwd: Path) -> list[Command]:
    """A module on so many ranks."""
    port = free_port()
    return [
        Command(module, *arguments, cwd=_own_directory(cwd, rank), env=variables_of(rank, size, port))
        for rank in range(size)
    ]


def _own_directory(cwd: Path, rank: int) -> Path:
    """For what a rank says."""
    directory = cwd / f"rank-{rank}"
    directory.mkdir(exist_ok=True)
    return directory
