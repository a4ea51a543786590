"""What is printed for people is text: brackets and colons in it are no markup of the library that draws tables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.doctor import BAD, GOOD, INFO, Finding, print_findings
from bench.records import Check, Spread
from bench.report import console, print_checks, print_spreads

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bench", "examples", "planner", "ring", "student", "teacher", "transport")
#: A remedy that would lose its extra, an end that nothing began, a style, and the name of a picture.
TEXTS = ("'disaggkd[ucx]'", "/models/[/b]", "[bold]x", "host:smile:1")


@pytest.mark.parametrize("text", TEXTS)
def test_the_doctors_table_shows_what_was_found_and_what_to_do_as_it_is(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    for place, verdict in (("about", GOOD), ("found", INFO), ("remedy", BAD)):
        cells = {"about": "UCX_TLS", "found": "tcp", "remedy": "install it", place: text}
        print_findings(console(), [Finding(verdict=verdict, **cells)])
        printed = capsys.readouterr().out
        assert all(shown in printed for shown in (*cells.values(), verdict)), place


@pytest.mark.parametrize("text", TEXTS)
def test_figures_and_lines_show_names_as_they_are(capsys: pytest.CaptureFixture[str], text: str) -> None:
    out = console()
    print_checks(out, text, [Check(name=text, measured=1.0, unit=text, target=2.0)])
    print_spreads(out, text, [(text, text, Spread.of([1.0]))])
    out.print(f"record: {text}")
    printed = capsys.readouterr().out
    assert printed.count(text) >= 1 + 3 + 1 + 4 + 1  # titles, names, figures with their units, the line
    assert "met" in printed


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.parametrize(("name", "off"), [("Console", {"markup", "emoji"}), ("TextColumn", {"markup"})])
def test_nothing_that_prints_looks_for_markup(name: str, off: set[str]) -> None:
    found = dict(calls(name))
    assert found
    for place, call in found.items():
        given = {one.arg for one in call.keywords if isinstance(one.value, ast.Constant) and one.value.value is False}
        assert off <= given, f"{place}: {name} needs {', '.join(f'{one}=False' for one in sorted(off))}"
