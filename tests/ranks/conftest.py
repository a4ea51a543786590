"""The system tests' models, data and teachers, and a world of ranks that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.world import World
from tests.system import conftest as system
from tests.system.conftest import Inputs
from tests.system.processes import Student, curve

endpoint, inputs, processes = system.endpoint, system.inputs, system.processes
start_student, start_teacher = system.start_student, system.start_teacher

#: 8 sequences a step on any number of ranks, over 50 samples: the seventh step of an epoch has 2.
NUM_STEPS = 16

StartWorld = Callable[..., World]


@pytest.fixture
def start_world(inputs: Inputs, tmp_path: Path) -> Iterator[StartWorld]:
    """Starts ranks with `inputs.settings` for NUM_STEPS steps; arguments come after them."""
    started: list[World] = []

    def start(*arguments: object, size: int, accum: int = 1, out: str = "out", **options: Any) -> World:
        cut = ("--steps", NUM_STEPS, "--batch-size", 8 // (size * accum), "--grad-accum", accum)
        world = World(*inputs.settings, *cut, *arguments, size=size, out=tmp_path / out, cwd=tmp_path, **options)
        started.append(world)
        return world

    yield start
    for world in started:
        world.end()


@pytest.fixture(scope="session")
def one_rank_curve(
    inputs: Inputs,
    endpoint: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Of a trainer that is alone."""
    root = tmp_path_factory.mktemp("alone")
    cut = ("--steps", NUM_STEPS, "--batch-size", 8, "--grad-accum", 1)
    alone = Student(*inputs.settings, *cut, "--teacher", endpoint, out=root / "out", cwd=root)
    alone.succeed()
    return curve(root / "out")
