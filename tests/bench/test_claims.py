"""The report: verdicts follow what was measured, memory caps are real, and the page needs nothing but itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.bench_report import main
from bench.claims import charts, layouts, memory, models, page, wires
from bench.claims.launched import field_bytes
from bench.claims.layouts import APART, FULL, FUSED, IN_TURNS, OVER_ZMQ
from bench.claims.loss_part import LossSizes, loss_seconds
from bench.claims.runs import WARMUP_STEPS, Command, Run
from bench.claims.section import Table
from bench.records import environment
from bench.stages import StageFailed
from tests.tiny_models import build_tiny_checkpoint

MIB = 1 << 20
LOSS_S = {FULL: 0.08, FUSED: 0.02, APART: 0.02}


def run_of(name: str, losses: list[float], *, error: str | None = None, **columns: float) -> Run:
    """A run with a step for each loss; `columns` are the same in all of them."""
    common = {
        "step_s": 0.1,
        "student_stall_s": 0.0,
        "teacher_s": 0.05,
        "teacher_stall_s": 0.05,
        "tokens_per_s": 1e3,
        "rows": 10,
        "peak_rss_bytes": 300 * MIB,
    }
    steps = [common | columns | {"step": n, "lm_loss": x, "loss": x} for n, x in enumerate(losses, start=1)]
    return Run(
        command=Command(name=name, arguments=(), serving=("--dtype", "bf16")),
        shell=f"python -m student.train # {name}",
        steps=steps,
        error=error,
        imports_bytes=200 * MIB,
        summary={"bytes_received": 0},
    )


def four_curves(**changed: list[float]) -> dict[str, Run]:
    curve = [4.0, 3.5, 3.25]
    names = {"full": FULL, "fused": FUSED, "apart": APART, "zmq": OVER_ZMQ}
    return {name: run_of(name, changed.get(key, curve)) for key, name in names.items()}


def test_equal_curves_hold_and_a_last_bit_that_differs_does_not() -> None:
    assert layouts.same_loss(four_curves(full=[4.00001, 3.5, 3.25])).verdict == "holds"
    assert layouts.same_loss(four_curves(zmq=[4.0, 3.5, 3.2500000000000004])).verdict == "fails"
    assert layouts.same_loss(four_curves(full=[4.01, 3.5, 3.25])).verdict == "fails"


def test_the_pace_holds_where_the_slower_side_is_busy() -> None:
    def found(**columns: float) -> str:
        runs = {name: run_of(name, [1.0] * 10) for name in (FULL, FUSED)}
        section = layouts.pace(runs | {APART: run_of(APART, [1.0] * 10, **columns)}, LOSS_S)
        assert section.facts["layouts"][APART]["loss_alone_s"] == LOSS_S[APART]
        return section.verdict

    assert found(student_stall_s=0.005) == "holds"
    assert found(student_stall_s=0.06, teacher_s=0.1) == "holds", "the teacher is the slower side, and busy"
    assert found(student_stall_s=0.06, teacher_s=0.04) == "fails", "neither is busy"


def test_a_teacher_that_serves_many_requests_in_one_pass_is_not_taken_for_an_idle_one() -> None:
    """Its time is in the step of the first of them, and none in the others."""
    run = run_of(FUSED, [1.0] * (WARMUP_STEPS + 6))
    steps = [dict(step) | {"teacher_s": 0.3 if number % 3 == 0 else 0.0} for number, step in enumerate(run.steps)]
    assert layouts.Pace.of(replace(run, steps=steps)).teacher_s == pytest.approx(0.1)


def test_the_loss_alone_is_measured_in_a_process() -> None:
    sizes = LossSizes(rows=8, vocab_size=64, student_hidden=16, teacher_hidden=32)
    assert all(loss_seconds(kind, sizes, num_threads=1, device="cpu") > 0 for kind in ("full", "fused"))
    with pytest.raises(StageFailed, match=r"the fused loss alone: exit 1: .*no-such-device"):
        loss_seconds("fused", sizes, num_threads=1, device="no-such-device")


def test_words_read_from_the_left_and_figures_from_the_right() -> None:
    table = Table(
        columns=("layout", "peak", "what came of it"), rows=[("a", "1,234 MiB", "x" * 40), ("b", "2 MiB", "-")]
    )
    assert [table.is_text(column) for column in range(3)] == [True, False, True]


def test_pictures_take_their_ink_from_the_page() -> None:
    """A dark page would hide black letters."""
    variables = set(re.findall(r"(--\w+):", page.TEMPLATE.read_text()))
    for svg in (
        charts.bars({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0, "y": 1.0}}, x_label="ms"),
        charts.lines({"a": [(1, 2.0), (2, 3.0)], "b": [(1, 2.0), (2, 4.0)]}, x_label="x", y_label="y"),
        charts.sizes({"a": [(1, 2.0), (16, 3.0)]}, dashed=("a",), x_label="x", y_label="y"),
    ):
        used = set(re.findall(r"var\((--\w+)\)", svg))
        assert "--ink" in used
        assert used <= variables
        assert not re.search(r"#(?!000000|ffffff)[0-9a-f]{6}\b", svg), "a colour that is none of the page's"
        assert "<text" in svg


def held_of(*, together: str | None, apart: str | None) -> memory.Held:
    return memory.Held(
        free={FUSED: run_of(FUSED, [1.0], peak_rss_bytes=1000 * MIB), APART: run_of(APART, [1.0])},
        ranks={FUSED: run_of(FUSED, [1.0], peak_rss_bytes=600 * MIB), APART: run_of(APART, [1.0])},
        capped={FUSED: run_of(FUSED, [], error=together), APART: run_of(APART, [1.0], error=apart)},
        predicted={FUSED: 790 * MIB, APART: 100 * MIB},
        headroom_bytes=115 * MIB,
    )


@pytest.mark.parametrize(
    ("together", "apart", "verdict"),
    [
        (
            "exit 1: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
            None,
            "holds",
        ),
        ("exit 2: weights: unable to mmap 8 bytes: Cannot allocate memory (12)", None, "holds"),
        (None, None, "fails"),
        ("exit 1: MemoryError", "exit 1: MemoryError", "fails"),
        (None, "exit 1: MemoryError", "fails"),
        ("exit 2: --batch-size must be >= 1", None, "open"),
        ("exit 1: MemoryError", "exit 3: no replica has served this run", "open"),
    ],
)
def test_out_of_memory_holds_only_if_one_runs_out_and_the_other_trains(
    together: str | None, apart: str | None, verdict: str
) -> None:
    section = memory.out_of_memory(held_of(together=together, apart=apart))
    assert section.verdict == verdict
    assert section.facts["errors"] == {FUSED: together, APART: apart}


def test_predictions_are_held_against_measurements() -> None:
    teacher = models.Width(hidden_size=8, vocab_size=100, element_bytes=4)
    head, rows = 100 * 8 * 2, 3 * 10 * 8 * 2
    right = replace(run_of(APART, [1.0] * 3), summary={"bytes_received": head + rows})
    held = held_of(together="x", apart=None)
    shape = layouts.Shape(steps=3, sequence_tokens=4, batch_size=1, ring_depth=3, device="cpu")
    turns = run_of(IN_TURNS, [1.0] * 3, step_s=0.15, student_stall_s=0.05)
    turns = replace(turns, command=Command(name=IN_TURNS, arguments=()))
    assert models.forms({APART: right, IN_TURNS: turns}, {}, held, shape, teacher).verdict == "holds"
    wrong = replace(right, summary={"bytes_received": head + rows + 1})
    section = models.forms({APART: wrong, IN_TURNS: turns}, {}, held, shape, teacher)
    assert section.verdict == "fails"
    assert APART in section.finding
    slow = replace(turns, steps=[dict(step) | {"step_s": 0.3} for step in turns.steps])
    section = models.forms({APART: right, IN_TURNS: slow}, {}, held, shape, teacher)
    assert section.verdict == "fails", "a step is predicted from other runs than the one that it is held against"
    assert "step: disaggregated" in section.finding


def test_a_cap_fails_an_allocation_beyond_it_and_only_that(tmp_path: Path) -> None:
    """A module that allocates what it is told, under the cap that the report puts on trainers."""
    (tmp_path / "hungry.py").write_text(
        "import sys, torch\ntorch.ones(int(sys.argv[1]), dtype=torch.uint8)\nprint('fed')\n"
    )
    note = tmp_path / "imports"

    def allocate(num_bytes: int, headroom: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench.claims.launched", str(note), str(headroom), "hungry", str(num_bytes)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert allocate(64 * MIB, 128 * MIB).stdout == "fed\n"
    refused = allocate(256 * MIB, 128 * MIB)
    assert refused.returncode == 1
    assert "allocate" in refused.stderr
    assert 50 * MIB < int(note.read_text()) < 4096 * MIB


def test_a_field_that_the_kernel_does_not_have_is_an_error() -> None:
    assert field_bytes("VmHWM") >= field_bytes("VmRSS") > 0
    with pytest.raises(OSError, match="VmNone"):
        field_bytes("VmNone")


def transport_records() -> list[dict[str, Any]]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value}

    def size(mib: int, verdict: str) -> dict[str, Any]:
        speeds = {"memcpy gb_per_s": spread(20.0), "bare socket gb_per_s": spread(2.0), "zmq gb_per_s": spread(1.9)}
        check = {"name": f"zmq, {mib}", "measured": 0.95, "target": 0.85, "verdict": verdict}
        return {"case": f"{mib}", "settings": {"fill_bytes": mib * MIB}, "measured": speeds, "checks": [check]}

    trips = {"case": "trips", "settings": {}, "measured": {"zmq trip_s": spread(5e-5)}, "checks": []}
    return [size(1, "met"), size(16, "met"), trips]


def test_a_transport_beyond_its_limit_is_named() -> None:
    records = transport_records()
    assert wires.transports(records).verdict == "holds"
    records[1]["checks"][0]["verdict"] = "failed"
    section = wires.transports(records)
    assert section.verdict == "fails"
    assert "zmq, 16" in section.finding


def test_the_page_and_its_figures_need_nothing_but_themselves(tmp_path: Path) -> None:
    sections = [
        layouts.same_loss(four_curves()),
        memory.trainer_process(held_of(together="x", apart=None)),
        wires.transports(transport_records()),
    ]
    sections[0] = replace(sections[0], finding="<script>alert(1)</script>")
    path = page.write(
        sections,
        out=tmp_path,
        command="python -m bench report",
        about="Two models.",
        wall_s=61.0,
        environment=environment(),
    )
    text = path.read_text()
    assert "<script>" not in text, "what a run said is text, whatever it said"
    outside = [url for url in re.findall(r'(?:src|href)="([^"]+)"', text) if not url.startswith("#")]
    assert outside == []
    assert text.count("<svg") == 3
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "summary.md").read_text().splitlines()
    assert len(table) == 2 + len(sections)
    assert {line.count("|") for line in table} == {5}
    facts = json.loads((tmp_path / "report.json").read_text())
    assert [claim["verdict"] for claim in facts["claims"]] == ["holds", "holds", "holds"]
    assert facts["claims"][0]["commands"][APART].endswith(APART)
    assert facts["environment"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "2"], "--steps must be >= 8"),
        (["--teacher", "somewhere"], "--student None"),
        (["--colour", "red"], "--colour"),
        (["--device", "cuda:99", "--out", "/nowhere"], "--device cuda:99"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "--teacher {teacher}: "),
        ("[]", "--teacher {teacher}: its config.json holds no object"),
        ("{", "--teacher {teacher}: "),
        ('{"model_type": "mamba"}', "--teacher {teacher}: no prediction of its memory, which a claim is about: "),
    ],
    ids=["no config", "no object", "no json", "unknown type"],
)
def test_a_model_that_nothing_can_be_predicted_for_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None, said: str
) -> None:
    teacher, out = tmp_path / "teacher", tmp_path / "out"
    teacher.mkdir()
    if config is not None:
        (teacher / "config.json").write_text(config)
    student = build_tiny_checkpoint(tmp_path / "student")
    flags = ["--teacher", str(teacher), "--student", str(student), "--data", "text.jsonl", "--out", str(out)]
    capsys.readouterr()  # transformers' bar while it saved the student
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.format(teacher=teacher) in line
    assert not out.exists()


def test_a_hub_id_that_cannot_be_had_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """In a process of its own, since the libraries read the variables when they are loaded."""
    student = build_tiny_checkpoint(tmp_path / "student")
    models = ["--teacher", "owner/absent", "--student", str(student), "--data", "text.jsonl"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "bench", "report", *models, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--teacher owner/absent: no such directory, and no such model in the cache" in line
    assert not (tmp_path / "out").exists()


def test_a_cached_hub_id_is_as_good_as_a_directory(tmp_path: Path) -> None:
    source = build_tiny_checkpoint(tmp_path / "source")
    snapshot = tmp_path / "hf" / "hub" / "models--owner--cached" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((source / "config.json").read_bytes())
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    code = "from bench.claims.pair import config_of; print(config_of('owner/cached', flag='--teacher')['model_type'])"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "qwen3\n"


def test_a_report_that_cannot_be_drawn_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """As where the extra `report` is not installed."""
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "bench", "report", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the report needs matplotlib" in line
    assert not (tmp_path / "out").exists()
