"""Documentation that moves with the code: flags, metrics, errors, links, commands, examples, words, dependencies.

A failure here says which page lacks which line. Facts are taken from the code and from one real run, never from a list
that would have to be kept in step by hand; the exception is DESIGN_WORDS, the vocabulary that was agreed on at first.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import enum
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from bench.bench_core import CoreBenchConfig
from bench.bench_kd_loss import LossBenchConfig
from bench.bench_pipeline import PipelineConfig
from bench.bench_ranks import RanksBenchConfig
from bench.bench_report import ReportConfig
from bench.bench_transport import TransportConfig
from bench.doctor import DoctorConfig
from examples.demo.__main__ import DemoConfig
from examples.demo_cluster import ClusterConfig
from planner.settings import PlanSettings
from ring.command import parse
from ring.core.errors import ConfigError
from ring.core.messages import RefusalCode
from ring.core.stats import DropCause, RetryCause
from student.config import TrainConfig
from student.metrics import StepMetrics
from student.train.claim import LOCK_FILE
from teacher.serve import ServeConfig
from tests.tiny_models import build_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README, OPERATIONS, GLOSSARY = ROOT / "README.md", DOCS / "operations.md", DOCS / "glossary.md"
PAGES = (README, ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")))
#: Pages for users: every flag that they name must be a flag of one of these commands, or of those whose --help is all.
USER_PAGES = (README, *sorted(set(DOCS.glob("*.md")) - {DOCS / "lab-log.md"}))
#: By name: the page and the heading under which its flags are.
COMMANDS: dict[str, tuple[Path, str, Any]] = {
    "teacher.serve": (OPERATIONS, "Flags of teacher.serve", ServeConfig),
    "student.train": (OPERATIONS, "Flags of student.train", TrainConfig),
    "examples.demo": (OPERATIONS, "Flags of the demo", DemoConfig),
    "examples.demo_cluster": (OPERATIONS, "Flags of demo-cluster", ClusterConfig),
    "planner": (OPERATIONS, "Flags of planner", PlanSettings),
    "disaggkd doctor": (OPERATIONS, "Flags of disaggkd doctor", DoctorConfig),
    "bench report": (DOCS / "report.md", "Your own models, and GPUs", ReportConfig),
}
BENCHES = (TransportConfig, PipelineConfig, LossBenchConfig, CoreBenchConfig, RanksBenchConfig)
#: What every command has from the parser, `disaggkd` and `disaggkd keys` have, and other projects' commands have.
COMMON_FLAGS = {"--config", "--help", "--print_config", "--version", "--only"}
TORCHRUN_FLAGS = {"--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--max-restarts", "--shutdown-timeout"}
PYTEST_FLAGS = {"--benchmark-autosave", "--benchmark-compare"}
PACKAGES = ("ring", "transport", "teacher", "student", "planner", "bench", "examples")
DESIGN_WORDS = (
    "slot, lease, request, seq, attempt, epoch, fill, completion, depth, in flight, stall, "
    "position, acked, spare, window, shard, tile, row, head, replica, rank, world size, wire dtype"
)

PageIds = [page.relative_to(ROOT).as_posix() for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=PageIds)
every_command = pytest.mark.parametrize("command", COMMANDS)


def prose(page: Path) -> str:
    """A page without its code blocks, whose comments look like headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def section(page: Path, title: str) -> str:
    """The text under a heading, up to the next heading of its level or above; without code blocks."""
    lines = prose(page).splitlines()
    starts = [n for n, line in enumerate(lines) if re.fullmatch(rf"#+ {re.escape(title)}", line)]
    assert len(starts) == 1, f"{page.name} needs one heading '{title}', has {len(starts)}"
    level = lines[starts[0]].split()[0]
    found = []
    for line in lines[starts[0] + 1 :]:
        if re.match(r"#+ ", line) and len(line.split()[0]) <= len(level):
            break
        found.append(line)
    return "\n".join(found)


def table(page: Path, title: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by the name in backticks in their first cell."""
    rows: dict[str, list[str]] = {}
    for line in section(page, title).splitlines():
        if match := re.match(r"\| `([^`]+)` \|", line):
            assert match[1] not in rows, f"{page.name}, '{title}': {match[1]} has two rows"
            rows[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
        elif rows and not line.startswith("|"):
            break
    assert rows, f"{page.name}, '{title}': no table whose rows begin with | `name` |"
    return rows


def assert_same(found: set[str], wanted: set[str], where: str) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    assert not missing, f"{where}: add a row for {', '.join(missing)}"
    assert not extra, f"{where}: remove the row of {', '.join(extra)}: the code does not have it"


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def flags_of(config_type: Any) -> dict[str, dataclasses.Field[Any]]:
    return {"--" + field.name.replace("_", "-"): field for field in dataclasses.fields(config_type)}


def shown_default(value: object) -> str:
    """A default as the tables write it."""
    if value in (None, "", ()):
        return "-"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# ---- flags -----------------------------------------------------------------------------------------------------------


@every_command
def test_every_flag_has_a_row_and_every_row_a_flag(command: str) -> None:
    page, title, config_type = COMMANDS[command]
    assert_same(set(table(page, title)), set(flags_of(config_type)), f"docs/{page.name}, '{title}'")


@every_command
def test_documented_defaults_are_the_defaults(command: str) -> None:
    page, title, config_type = COMMANDS[command]
    rows = table(page, title)
    for flag, field in flags_of(config_type).items():
        found, wanted = rows[flag][1], shown_default(field.default)
        assert found == wanted, f"docs/{page.name}, '{title}': {flag} defaults to {wanted}, the page says {found}"


@every_command
def test_every_choice_of_a_flag_is_named_in_its_row(command: str) -> None:
    page, title, config_type = COMMANDS[command]
    rows, hints = table(page, title), get_type_hints(config_type)
    for flag, field in flags_of(config_type).items():
        for choice in get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else ():
            assert f"`{choice}`" in rows[flag][2], f"docs/{page.name}, '{title}': {flag} may be `{choice}`; say so"


def test_no_page_names_a_flag_that_does_not_exist() -> None:
    configs = [*BENCHES, *(config_type for _, _, config_type in COMMANDS.values())]
    known = COMMON_FLAGS.union(TORCHRUN_FLAGS, PYTEST_FLAGS, *map(flags_of, configs))
    for page in USER_PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", page.read_text()))
        unknown = sorted(named - known)
        assert not unknown, f"{page.name} names {', '.join(unknown)}: no such flag of {', '.join(COMMANDS)} or a bench"


# ---- what a run writes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real run of `student.train` leaves: two steps on labels alone, with evaluation and checkpoints."""
    root = tmp_path_factory.mktemp("run")
    student = build_tiny_checkpoint(root / "student")
    text = root / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The ring turns {n} times."}) + "\n" for n in range(8)))
    arguments = ["--student", student, "--data", text, "--eval-data", text, "--kd-weight", 0, "--ce-weight", 1]
    arguments += ["--steps", 2, "--checkpoint-every", 1, "--max-length", 32, "--batch-size", 4]
    arguments += ["--out", root / "out", "--cache-dir", root / "cache", "--threads", 1, "--device", "cpu"]
    command = [sys.executable, "-m", "student.train", *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return root / "out"


def keys_of(lines: list[str]) -> set[str]:
    return set().union(*(json.loads(line) for line in lines))


def test_every_metric_of_a_step_is_documented(run_dir: Path) -> None:
    fields = {field.name for field in dataclasses.fields(StepMetrics)}
    assert_same(set(table(OPERATIONS, "metrics.jsonl")), fields, "docs/operations.md, 'metrics.jsonl'")
    assert keys_of((run_dir / "metrics.jsonl").read_text().splitlines()) == fields


@pytest.mark.parametrize("name", ["eval.jsonl", "summary.json"])
def test_every_field_of_a_report_is_documented(run_dir: Path, name: str) -> None:
    text = (run_dir / name).read_text()
    fields = set(json.loads(text)) if name.endswith(".json") else keys_of(text.splitlines())
    assert_same(set(table(OPERATIONS, name)), fields, f"docs/operations.md, '{name}'")


def test_every_file_of_a_run_is_documented(run_dir: Path) -> None:
    # While it is going on there is a lock as well.
    found = {entry.name + ("/" if entry.is_dir() else "") for entry in run_dir.iterdir()} | {LOCK_FILE}
    assert_same(set(table(OPERATIONS, "What a run writes")), found, "docs/operations.md, 'What a run writes'")


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_classes() -> dict[str, int | None]:
    """Every error that DisaggKD raises on purpose, and its exit code; None where each error has its own."""
    bases: dict[str, list[str]] = {}
    codes: dict[str, int | None] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    for name, value in own_exit_codes(node):
                        codes[node.name] = value if name == "exit_code" else None

    def is_error(name: str) -> bool:
        return name == "DisaggKDError" or any(is_error(base) for base in bases.get(name, []))

    def code_of(name: str) -> int | None:
        return codes[name] if name in codes else code_of(next(base for base in bases[name] if is_error(base)))

    return {name: code_of(name) for name in bases if is_error(name)}


def own_exit_codes(node: ast.ClassDef) -> Iterator[tuple[str, int | None]]:
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("exit_code", "self.exit_code"):
            value = statement.value
            yield ast.unparse(statement.targets[0]), value.value if isinstance(value, ast.Constant) else None  # type: ignore[misc]


def test_every_error_is_documented_with_its_exit_code() -> None:
    rows, errors = table(OPERATIONS, "Errors and what to do"), error_classes()
    assert_same(set(rows), set(errors), "docs/operations.md, 'Errors and what to do'")
    for name, code in errors.items():
        by_instance = {"Interrupted": "128 + signal", "RankFailed": "as that rank"}
        wanted = by_instance[name] if code is None else str(code)
        assert rows[name][1] == wanted, f"docs/operations.md: {name} ends a command with {wanted}, not {rows[name][1]}"


@pytest.mark.parametrize("causes", [RetryCause, DropCause, RefusalCode], ids=lambda causes: causes.__name__)
def test_every_cause_in_the_log_is_documented(causes: type[enum.Enum]) -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", section(OPERATIONS, "Warnings in the log"), flags=re.MULTILINE))
    missing = sorted({cause.value for cause in causes} - rows)
    assert not missing, f"docs/operations.md, 'Warnings in the log': add a row for {', '.join(missing)}"


# ---- links, paths, commands, examples --------------------------------------------------------------------------------


def anchor_of(heading: str) -> str:
    """The anchor that a heading gets on the usual hosts."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@every_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            anchors = {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)}
            assert anchor in anchors, f"{page.name} links to {target}; {path.name} has the anchors {sorted(anchors)}"


@every_page
def test_every_path_and_module_named_exists(page: Path) -> None:
    for name in re.findall(r"`([\w./-]+)`", page.read_text()):
        top = re.split(r"[./]", name)[0]
        if top not in {*PACKAGES, "docs", "tests"} or name == top:
            continue
        if "/" in name:
            assert (ROOT / name).exists(), f"{page.name} names `{name}`, which does not exist"
        elif name.endswith(".py"):
            found = any(next((ROOT / package).rglob(name), None) for package in PACKAGES)
            assert found, f"{page.name} names `{name}`: no file of ours is called so"
        else:
            assert module_or_member(name), f"{page.name} names `{name}`: no such module, and no such name in one"


def module_or_member(name: str) -> bool:
    """Whether a dotted name is a module of ours, or something that one defines or re-exports."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module, _, member = name.rpartition(".")
    if not (path.parent.is_dir() or path.parent.with_suffix(".py").is_file()):
        return False
    return hasattr(importlib.import_module(module), member)


def shell_lines(page: Path) -> list[list[str]]:
    """The words of every line in the page's bash blocks, continued lines joined."""
    text = "\n".join(code_blocks(page, "bash")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", [README, OPERATIONS], ids=["README.md", "operations.md"])
def test_every_shown_command_line_is_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("\n".join(code_blocks(page, "yaml")))
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    lines = shell_lines(page)
    for words in lines:
        if words[0] == "torchrun":
            # What it starts is as if python did.
            words = ["python", *words[words.index("-m") :]]
        if words[:2] == ["python", "-m"]:
            assert words[2] in COMMANDS, f"{page.name} shows python -m {words[2]}: no such command"
            try:
                config = parse(COMMANDS[words[2]][2], words[3:], prog=words[2], description="")
            except ConfigError as error:
                pytest.fail(f"{page.name} shows `{shlex.join(words)}`, which is refused: {error}", pytrace=False)
            assert "run.yaml" not in words or config.batch_size == 8
        elif words[0] == "make":
            assert words[1] in targets, f"{page.name} shows make {words[1]}; the Makefile has {sorted(targets)}"
        else:
            assert words[0] in ("python3", "source", "pip"), f"{page.name} shows {words[0]}, which nothing here checks"
    assert any(words[:2] == ["python", "-m"] for words in lines)


def test_readme_opens_with_the_two_commands() -> None:
    assert [words[:2] for words in shell_lines(README)[:2]] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("page", [README, DOCS / "cost-models.md"], ids=["README.md", "cost-models.md"])
def test_python_examples_run_and_say_what_they_say(page: Path) -> None:
    blocks = code_blocks(page, "python")
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        if ">>>" in block:
            output: list[str] = []
            example = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0)
            result = doctest.DocTestRunner(verbose=False).run(example, out=output.append, clear_globs=False)
            names |= example.globs
            assert result.failed == 0, "".join(output)
        else:
            exec(compile(block, str(page), "exec"), names)


# ---- words and dependencies ------------------------------------------------------------------------------------------


def glossary_words() -> list[str]:
    return re.findall(r"^- \*\*(.+?)\*\*:", GLOSSARY.read_text(), flags=re.MULTILINE)


def test_glossary_is_sorted_and_says_each_word_once() -> None:
    words = glossary_words()
    assert words == sorted(set(words), key=str.lower), "docs/glossary.md: sort it by word, and say each word once"


def test_glossary_has_the_words_of_the_design() -> None:
    missing = [word for word in DESIGN_WORDS.split(", ") if word not in glossary_words()]
    assert not missing, f"docs/glossary.md: add a line for {', '.join(missing)}"


def test_every_direct_dependency_has_a_reason_and_a_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    texts += [text for extra in project["project"]["optional-dependencies"].values() for text in extra]
    wanted = {re.split(r"[^\w-]", text)[0] for text in texts} - {project["project"]["name"]}
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.+) \|$", (DOCS / "dependencies.md").read_text(), flags=re.MULTILINE))
    rows.pop("Package")
    assert_same(set(rows), wanted, "docs/dependencies.md")
    for name, rest in rows.items():
        reason, licence = rest.split(" | ")
        assert reason.strip(), f"docs/dependencies.md: {name} has no reason"
        assert licence.strip(), f"docs/dependencies.md: {name} has no licence"
