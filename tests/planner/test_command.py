"""`python -m planner`: what it prints, how fast, and how it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main as disaggkd
from planner.cli import main, parse

ROOT = Path(__file__).resolve().parents[2]
ASKED = ["--teacher", "Qwen3.5-35B-A3B", "--student", "Qwen3.5-9B", "--gpus", "8", "--gpu-memory-gb", "80"]
ASKED += ["--tokens-per-gpu", "8192"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*ASKED, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_answers_without_loading_a_tensor_library_and_json_without_rich() -> None:
    code = (
        "import sys; from planner.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'transformers', 'matplotlib', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    for arguments, loaded in ((["--json"], "[]"), ([], "['rich']")):
        command = [sys.executable, "-c", code, *ASKED, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == loaded


def test_people_get_a_verdict_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    printed = capsys.readouterr().out
    assert "Colocated with the fused loss is enough." in printed
    for title in ("Layouts", "Memory of a training GPU", "The disaggregated pipeline", "The most that fits"):
        assert title in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("name", ["base[v2]", "base:smile:"])
def test_a_model_is_named_as_its_directory_is(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """Its brackets and colons are no markup of the tables."""
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert main(["--teacher", str(tmp_path / name), "--student", str(tmp_path / name), "--gpus", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"{name} (" in printed
    assert f"teaches {name}" in printed.replace("\n", " ")


def test_every_key_of_the_json_is_documented_and_every_documented_key_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = answer(capsys, "--simulate", "--nodes", "2", "--sweep", "tokens", "--out", str(tmp_path))

    def keys(value: object, under: str) -> set[str]:
        if isinstance(value, list):
            return keys(value[0], under + "[]") if value else {under + "[]"}
        # By name: components, terms and stages, whose keys are names of things.
        if not isinstance(value, dict) or under.endswith(("_by_component", "_by_moment", "_by_stage", ".settings")):
            return {under}
        return {under} | {name for key, inner in value.items() for name in keys(inner, f"{under}.{key}")}

    wanted = {key.removeprefix(".") for key in keys(found, "") if key}
    page = (ROOT / "docs" / "planner-json.md").read_text()
    documented = set(re.findall(r"^\| `([\w.\[\]]+)` \|", page, flags=re.MULTILINE))
    assert documented == wanted


def test_json_says_what_the_tables_say(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys)
    assert found["schema_version"] == 1
    assert found["verdict"]["choice"] == "colocated"
    assert found["teacher_model"]["num_params"] == 34_660_610_688
    assert sum(found["student_model"]["num_params_by_component"].values()) == found["student_model"]["num_params"]
    for layout in found["layouts"]:
        memory = layout["memory"]
        moments = {name: sum(terms.values()) for name, terms in memory["bytes_by_moment"].items()}
        assert memory["peak_bytes"] == max(moments.values()) == moments[memory["peak_moment"]]
        assert layout["fits"] is (layout["needed_bytes"] <= layout["capacity_bytes"])
    assert found["traffic"]["hidden_bytes_per_step"] == 8 * 8192 * 4096
    assert found["sweep"] == []


def test_explanations_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    moment, terms = 0, 0
    for line in lines:
        if match := re.fullmatch(r"  (\w+): ([\d,]+) bytes(  <- peak)?", line):
            assert moment == terms
            moment, terms = int(match[2].replace(",", "")), 0
        elif match := re.fullmatch(r"    \w+ +([\d,]+)  = .+", line):
            terms += int(match[1].replace(",", ""))
    assert moment == terms > 0
    assert any("4 N / 8 = 4 x 8,953,803,264 / 8" in line for line in lines)


def test_a_sweep_leaves_a_picture_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--sweep", "tokens", "--out", str(tmp_path / "out")]) == 0
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["sweep.csv", "sweep.json", "sweep.png", "sweep.svg"]
    printed = capsys.readouterr().out.replace("\n", "")
    assert all(f"out/{name}" in printed for name in written)
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "out" / "sweep.csv").read_text().splitlines()
    points = json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]
    assert rows[0] == "label,x,layout,loss,peak_bytes,needed_bytes,fits"
    assert len(rows) == len(points) + 1 == 25


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--teacher and --student not given"),
        (["--teacher", "nobody"], "--student not given"),
        (["--teacher", "nobody", "--student", "Qwen3.5-9B"], "--teacher nobody: no preset"),
        ([*ASKED, "--gpus", "many"], "argument --gpus: invalid int value: 'many'"),
        ([*ASKED, "--gpus", "0"], "--gpus must be 1 to 1000000, got 0"),
        ([*ASKED, "--gpus", "10000", "--nodes", "10000"], "--gpus 10000 x --nodes 10000 are 100000000 GPUs"),
        ([*ASKED, "--nodes", "1000", "--simulate"], "a simulation of 8,000 trainers; allowed: at most 1,136"),
        (
            [*ASKED, "--ring-depth", "100000", "--simulate"],
            "8 trainers with 100,000 slots each; allowed: at most 62,500",
        ),
        ([*ASKED, "--student", ""], "--student is empty; allowed: a preset"),
        ([*ASKED, "--teacher", "planner"], "--teacher planner: a directory without a config.json"),
        ([*ASKED, "--teacher", "~nobody-of-that-name/x"], "--teacher ~nobody-of-that-name/x: Could not determine home"),
        ([*ASKED, "--teacher", "x" * 300], f"--teacher {'x' * 300}: File name too long; allowed: a preset"),
        ([*ASKED, "--teacher", "planner/" + "x" * 300], "File name too long; allowed: a preset"),
        ([*ASKED, "--teacher", "owner/" + "x" * 300], "no preset, no directory, no config.json"),
        ([*ASKED, "--teacher", "./Qwen3-8B"], "--teacher ./Qwen3-8B: no such directory or file; allowed: one that is"),
        ([*ASKED, "--teacher", "~/Qwen3-8B"], "or the preset Qwen3-8B"),
        ([*ASKED, "--teacher", "/models/Qwen3-8B"], "or the preset Qwen3-8B"),
        ([*ASKED, "--teacher", "models/base/Qwen3-8B"], "or the preset Qwen3-8B"),
        ([*ASKED, "--teacher", "planner/Qwen3-8B"], "--teacher planner/Qwen3-8B: no such directory or file"),
        ([*ASKED, "--teacher-gpu", "foo"], "--teacher-gpu foo: no such preset"),
        ([*ASKED, "--teacher-dtype", "fp8"], "argument --teacher-dtype: invalid choice: 'fp8'"),
        ([*ASKED, "--wire-dtype", "fp16"], "unrecognized arguments: --wire-dtype fp16"),
        ([*ASKED, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        ([*ASKED, "--precision", "fp7"], "argument --precision: invalid choice: 'fp7'"),
        ([*ASKED, "--checkpointing", "maybe"], "invalid value 'maybe'; allowed: on, off"),
        ([*ASKED, "--sweep", "tokens", "--out", "/proc/nowhere"], "can't be written"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("planner: error: ")
    assert said in line


def test_a_preset_that_stands_for_a_model_of_the_hub_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert main([*ASKED, "--teacher", "Qwen/Qwen3.5-35B-A3B"]) == 0
    (said,) = caplog.messages
    assert (
        said == "--teacher Qwen/Qwen3.5-35B-A3B: no directory and not in the cache; the preset Qwen3.5-35B-A3B is taken"
    )


def test_many_nodes_are_answered_in_doubling_steps(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--nodes", "100")
    nodes = sorted({layout["num_nodes"] for layout in found["layouts_by_nodes"]})
    assert nodes == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 100]
    assert {layout["num_nodes"] for layout in answer(capsys, "--nodes", "3")["layouts_by_nodes"]} == {1, 2, 3}


def test_a_teacher_smaller_than_its_student_is_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = answer(capsys, "--teacher", "Qwen3.5-0.8B")["verdict"]["warnings"]
    assert any("wrong way round" in warning for warning in warnings)
    assert answer(capsys)["verdict"]["warnings"] == []


def test_every_line_of_a_reason_is_indented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--gpus", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begins, ends = lines.index("Nothing fits on these GPUs."), lines.index("")
    assert ends > begins + 2
    assert all(line.startswith("  ") for line in lines[begins + 1 : ends])
    assert "optimizer state" in " ".join(line.strip() for line in lines[begins:ends])


def test_disaggkd_plan_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert disaggkd(["plan", *ASKED, "--json"]) == 0
    through_the_front = capsys.readouterr().out
    assert main([*ASKED, "--json"]) == 0
    assert capsys.readouterr().out == through_the_front


def test_switches_are_turned_on_and_off() -> None:
    assert parse(["--simulate"]).simulate
    assert not parse(["--simulate", "off"]).simulate
    assert parse([]).checkpointing
    assert not parse(["--checkpointing", "false"]).checkpointing


def test_the_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    for name in ("Qwen3.5-397B-A17B", "H200-141", "400GbE"):
        assert name in printed
