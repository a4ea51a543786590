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
from bench.claims import layouts, memory, models, page, wires
from bench.claims.launched import field_bytes
from bench.claims.layouts import APART, FULL, FUSED, OVER_ZMQ
from bench.claims.runs import Command, Run
from bench.records import environment

MIB = 1 << 20


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
        return layouts.pace(runs | {APART: run_of(APART, [1.0] * 10, **columns)}).verdict

    assert found(student_stall_s=0.005) == "holds"
    assert found(student_stall_s=0.06, teacher_s=0.1) == "holds", "the teacher is the slower side, and busy"
    assert found(student_stall_s=0.06, teacher_s=0.04) == "fails", "neither is busy"


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
        ("exit 1: out of memory", None, "holds"),
        (None, None, "fails"),
        ("exit 1", "exit 1", "fails"),
        (None, "exit 1", "fails"),
    ],
)
def test_out_of_memory_holds_only_if_one_fails_and_the_other_trains(
    together: str | None, apart: str | None, verdict: str
) -> None:
    section = memory.out_of_memory(held_of(together=together, apart=apart))
    assert section.verdict == verdict
    assert section.facts["errors"] == {FUSED: together, APART: apart}


def test_predictions_are_held_against_measurements() -> None:
    teacher = models.TeacherShape(hidden_size=8, vocab_size=100, element_bytes=4)
    head, rows = 100 * 8 * 2, 3 * 10 * 8 * 2
    right = replace(run_of(APART, [1.0] * 3), summary={"bytes_received": head + rows})
    held = held_of(together="x", apart=None)
    shape = layouts.Shape(steps=3, sequence_tokens=4, batch_size=1, ring_depth=3, device="cpu")
    assert models.forms({APART: right}, {}, held, shape, teacher).verdict == "holds"
    wrong = replace(right, summary={"bytes_received": head + rows + 1})
    section = models.forms({APART: wrong}, {}, held, shape, teacher)
    assert section.verdict == "fails"
    assert APART in section.finding


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
