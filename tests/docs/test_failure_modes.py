"""docs/failure-modes.md: every row has a test, every test that it names is there, and every hard case has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "failure-modes.md"
#: The numbers are those of the collection that the cases came from.
CASES = {37, 40, 41, 42, 43, 44, 46, 48, 49, 51, 52, 56, 57, 60, 62, 64}
HEADERS = {
    ("Fault", "What the user sees", "What the system does", "Test"),
    ("Case", "What goes wrong elsewhere", "Test"),
}


def rows() -> list[list[str]]:
    """The rows of all tables, without their heads."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("|--"):
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            if tuple(cells) not in HEADERS:
                found.append(cells)
    return found


def named_tests(text: str) -> list[tuple[str, str]]:
    return [(path, name) for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)]


@cache
def marks_of(path: str) -> dict[str, set[int]]:
    """The tests of a file, and which cases each is marked with."""
    file = ROOT / path
    if not file.is_file():
        return {}
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {
            int(argument.value)
            for mark in function.decorator_list
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case"
            for argument in mark.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
        }
        for function in functions
        if function.name.startswith("test_")
    }


def test_every_row_has_its_cells_and_a_test() -> None:
    assert len(rows()) > 50
    for cells in rows():
        assert len(cells) in (3, 4), f"a row with {len(cells)} cells: {cells}"
        assert all(cells), f"an empty cell: {cells}"
        assert named_tests(cells[-1]), f"no test: {cells[0]}"
        rest = re.sub(r"`[^`]+`|[, ]", "", cells[-1])
        assert not rest, f"what is this beside the test of '{cells[0]}': {rest}"


@pytest.mark.parametrize("path", sorted({path for path, _ in named_tests(PAGE.read_text())}))
def test_every_test_that_is_named_exists(path: str) -> None:
    for named, name in named_tests(PAGE.read_text()):
        if named == path:
            assert name in marks_of(path), f"docs/failure-modes.md names {path}::{name}, which does not exist"


def test_every_hard_case_has_its_row_and_its_tests_are_marked() -> None:
    case_rows = {int(cells[0]): named_tests(cells[-1]) for cells in rows() if cells[0].isdigit()}
    assert set(case_rows) == CASES
    marked: dict[int, set[tuple[str, str]]] = {case: set() for case in CASES}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        path = file.relative_to(ROOT).as_posix()
        for name, cases in marks_of(path).items():
            for case in cases:
                marked[case].add((path, name))
    for case, tests in case_rows.items():
        assert set(tests) == marked[case], f"case {case}: the page and the marks differ"
