"""The claim about transports, read from the records that `python -m bench transport` leaves."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.claimed import renew
from bench.claims import charts
from bench.claims.section import Chart, Section, Table
from bench.stages import StageFailed
from bench.tethered import tethered
from bench.transport_ways import MEMCPY, SHM, STREAM, ZMQ

#: Sizes that tell small fills from large ones, and few enough rounds for a page that is made in minutes.
FLAGS = ("--rounds", "3", "--min-bytes", str(1 << 20), "--max-bytes", str(16 << 20), "--round-bytes", str(128 << 20))

#: The transports and what two of them are held against; all ways in one picture are a tangle.
DRAWN = (SHM, ZMQ, "ucx shm", "ucx tcp", MEMCPY, STREAM)

Records = Sequence[Mapping[str, Any]]


def measure(root: Path) -> Records:
    """The bench's records, made anew. Raises StageFailed: it could not measure."""
    out = root / "transport"
    renew(out)
    command = [sys.executable, "-m", "bench", "transport", *FLAGS, "--out", str(out)]
    done = subprocess.run(tethered(command), capture_output=True, text=True, errors="replace", check=False)
    records = out / "transport.jsonl"
    # 1 is a figure beyond its limit, which the page says itself.
    if done.returncode not in (0, 1) or not records.exists():
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StageFailed(f"bench transport: exit {done.returncode}: {said[-1]}")
    return [json.loads(line) for line in records.read_text().splitlines()]


def transports(records: Records) -> Section:
    """Bytes a second, CPU and round trips of each way at the largest size; and how speed follows the size."""
    sizes = [record for record in records if "fill_bytes" in record["settings"]]
    trips = next(record for record in records if "fill_bytes" not in record["settings"])
    largest = max(sizes, key=lambda record: int(record["settings"]["fill_bytes"]))
    names = [key.removesuffix(" gb_per_s") for key in largest["measured"] if key.endswith(" gb_per_s")]
    rows = [_row(name, largest, trips) for name in sorted(names, key=lambda name: -_speed(largest, name))]
    checks = [check for record in sizes for check in record["checks"] if check["target"] is not None]
    missed = [check for check in checks if check["verdict"] == "failed"]
    megabytes = int(largest["settings"]["fill_bytes"]) >> 20
    drawn = [name for name in DRAWN if name in names]
    curve = charts.sizes(
        {
            name: [(int(record["settings"]["fill_bytes"]) / 2**20, _speed(record, name)) for record in sizes]
            for name in drawn
        },
        dashed=(MEMCPY, STREAM),
        x_label="MiB of a fill",
        y_label="GB/s",
    )
    return Section(
        title="The transports",
        claim="Each transport comes near what its medium can do without it.",
        number=f"{len(checks) - len(missed)} of {len(checks)}",
        measured="ratios to a bare copy, socket or UCX endpoint within their limits, at two sizes of a fill",
        finding=(
            f"{len(checks) - len(missed)} of {len(checks)} figures are within their limits"
            + (f"; not: {'; '.join(check['name'] for check in missed)}." if missed else ".")
        ),
        verdict="fails" if missed else "holds",
        tables=[
            Table(
                columns=(
                    f"fills of {megabytes} MiB",
                    "GB/s",
                    "of memcpy",
                    "of a bare socket",
                    "CPU s/GB",
                    "round trip",
                ),
                rows=rows,
            ),
            Table(
                columns=("figure", "measured", "target", "verdict"),
                rows=[
                    (check["name"], f"{check['measured']:.2f}", f">= {check['target']:.2f}", check["verdict"])
                    for check in checks
                ],
            ),
        ],
        charts=[
            Chart(
                svg=curve,
                caption="Speed by size, each grid line ten times the one below; dashed: what the transports are held "
                "against. The table has the other ways.",
            )
        ],
        commands={"bench transport": shlex.join(["python", "-m", "bench", "transport", *FLAGS])},
        facts={record["case"]: record["measured"] for record in records},
    )


def _row(name: str, record: Mapping[str, Any], trips: Mapping[str, Any]) -> tuple[str, ...]:
    speed = _speed(record, name)
    return (
        name,
        f"{speed:.2f}",
        *(f"{speed / _speed(record, base):.2f}" for base in (MEMCPY, STREAM)),
        _shown(record, f"{name} cpu_s_per_gb", "{:.2f}"),
        _shown(trips, f"{name} trip_s", "{:.0f} us", 1e6),
    )


def _speed(record: Mapping[str, Any], name: str) -> float:
    """GB/s."""
    return _median(record, f"{name} gb_per_s")


def _median(record: Mapping[str, Any], name: str) -> float:
    return float(record["measured"][name]["median"])


def _shown(record: Mapping[str, Any], name: str, template: str, scale: float = 1.0) -> str:
    return template.format(scale * _median(record, name)) if name in record["measured"] else "-"
