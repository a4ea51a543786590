"""keys, export and the benches: their flags are in docs/operations.md, as their help has them."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from bench import export, keys
from bench.__main__ import BENCHES, main
from bench.bench_core import CoreBenchConfig
from bench.bench_kd_loss import LossBenchConfig
from bench.bench_pipeline import PipelineConfig
from bench.bench_ranks import RanksBenchConfig
from bench.bench_transport import TransportConfig

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
CONFIGS: dict[str, Any] = {
    "transport": TransportConfig,
    "pipeline": PipelineConfig,
    "core": CoreBenchConfig,
    "ranks": RanksBenchConfig,
    "loss": LossBenchConfig,
}


def rows_of(name: str) -> dict[str, list[str]]:
    """The rows of a command, by flag or argument: default, and what it does."""
    lines = OPERATIONS.read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith(f"| `{name}` |")
    ]
    return {row[1].strip("`"): row[2:] for row in cells if len(row) == 4}


def shown(value: object) -> str:
    if value in (None, "", ()):
        return "-"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def test_every_bench_is_documented() -> None:
    assert set(CONFIGS) == set(BENCHES)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_flags_of_a_bench_are_those_of_its_help(name: str) -> None:
    wanted = {
        "--" + field.name.replace("_", "-"): [shown(field.default), field.metadata["help"]]
        for field in dataclasses.fields(CONFIGS[name])
    }
    assert rows_of(name) == wanted


@pytest.mark.parametrize(("name", "parser"), [("keys", keys._parser()), ("export", export._parser())])
def test_the_arguments_of_keys_and_export_are_documented(name: str, parser: argparse.ArgumentParser) -> None:
    actions = [action for action in parser._actions if action.dest != "help"]
    wanted = {action.option_strings[0] if action.option_strings else str(action.metavar) for action in actions}
    assert set(rows_of(name)) == wanted


@pytest.mark.parametrize("arguments", [["all", "--help"], ["all", "-h"]])
def test_the_help_of_all_benches_names_them(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"usage: bench all\b", shown)
    assert all(name in shown for name in BENCHES)
