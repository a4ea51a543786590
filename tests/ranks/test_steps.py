"""The same numbers however a step is cut: over ranks, by FSDP, over a vocabulary group, by accumulation.

Each world is started once and takes its steps in every way that fits it; what came of them is compared with one process
that takes each step in one microbatch. The last step of each epoch is a partial one, in which some rank has no row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks.steps import FAMILIES, LR, SEQUENCES_A_STEP, Way, ways
from tests.ranks.world import run_steps

#: Relative, by norm: one step's gradients, and the curve and weights after several.
GRADIENT_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}
CURVE_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4}
#: Of one in float32, seen: up to 1.2e-6 with experts, 4e-7 without. Of the weights that follow up to 0.3 of this.
GRADIENT_ERROR = 2e-6
#: Of a weight in float32, over all steps.
ROUNDING = 1e-6

#: Half a minute on two cores that do nothing else, for four ranks of the largest family.
GUARD_S = 600.0

Found = dict[str, Tensor]


def steps_of(size: int, cwd: Path, *, family: str | None) -> Found:
    cwd.mkdir()
    out = cwd / "found.safetensors"
    for rank in run_steps(size, family=family, out=out, cwd=cwd):
        rank.succeed(guard_s=GUARD_S)
    return load_file(out)


def of_way(found: Found, name: str) -> Found:
    return {key.removeprefix(f"{name}/"): value for key, value in found.items() if key.startswith(f"{name}/")}


def assert_same(found: Found, wanted: Found, way: Way) -> None:
    reach = of_way(wanted, "reach")
    assert found.keys() - {f"reach/{name}" for name in reach} == wanted.keys() - {f"reach/{name}" for name in reach}
    for what in found:
        kind, _, name = what.partition("/")
        if kind == "reach":
            continue
        ours, theirs = found[what].double(), wanted[what].double()
        if kind == "weights" and way.dtype == "fp32":
            # Never 0: the row of a token that only pads has neither weight nor gradient.
            slack = GRADIENT_ERROR * reach[name] + ROUNDING * theirs.abs() + 1e-30
            # Else it would say nothing.
            assert float((slack < 0.1 * LR).double().mean()) > 0.7, f"{way.name}: {what}"
            error = float(((ours - theirs).abs() / slack).max())
            assert error <= 1, f"{way.name}: {what} differs by {error:.2g} times what the gradients allow"
            continue
        limits = GRADIENT_TOLERANCES if kind == "gradients" else CURVE_TOLERANCES
        error = float((ours - theirs).norm() / theirs.norm())
        assert error <= limits[way.dtype], f"{way.name}: {what} differs by {error:.2g}"


def check_world(size: int, alone: Found, cwd: Path, *, family: str | None) -> int:
    found = steps_of(size, cwd, family=family)
    checked = list(ways(size, family=family))
    for way in checked:
        mark = "-fsdp-ckpt" if way.checkpointing else ""
        wanted = of_way(alone, f"{way.family}-{way.dtype}-world1-batch{SEQUENCES_A_STEP}{mark}")
        assert_same(of_way(found, way.name), wanted, way)
    return len(checked)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Found]:
    made: dict[str | None, Found] = {}

    def get(family: str | None) -> Found:
        if family not in made:
            made[family] = steps_of(1, tmp_path_factory.mktemp("alone") / str(family), family=family)
        return made[family]

    return get


@pytest.mark.case(41)
@pytest.mark.case(42)
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_over_ranks_is_the_step_of_one_process(
    alone: Callable[[str | None], Found], tmp_path: Path, size: int
) -> None:
    assert check_world(size, alone(None), tmp_path / "world", family=None) >= 5


@pytest.mark.slow
@pytest.mark.timeout(2 * GUARD_S + 60)  # of this cut, and of the one process that it is compared with
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_cut_of_a_step_gives_the_same_numbers(
    alone: Callable[[str | None], Found], tmp_path: Path, size: int, family: str
) -> None:
    """fp32 and fp64, FSDP, vocabulary groups of every size that fits, every accumulation."""
    assert check_world(size, alone(family), tmp_path / "world", family=family) >= 8
