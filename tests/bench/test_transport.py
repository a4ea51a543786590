"""The transport bench: what it measures, what it holds against what, what it leaves behind, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bench_transport
from bench.bench_transport import MARGIN, TARGETS, TransportConfig
from bench.transport_perftest import parse_figures, perftest_program
from bench.transport_ways import BASE_OF, MEMCPY, Pace
from ring.core.errors import ConfigError, TransportError

MIB = 1 << 20


def paces(gb_per_s: float) -> list[Pace]:
    return [Pace(gb_per_s=gb_per_s, cpu_s_per_gb=0.5, queued_frac=0.0)] * 3


def test_every_way_is_measured_checked_recorded_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--rounds",
        "1",
        "--round-bytes",
        "262144",
        "--min-bytes",
        "65536",
        "--max-bytes",
        "262144",
        "--trips",
        "3",
    ]
    picture = tmp_path / "plot.png"
    # Below the size that targets are for: whatever the machine does meanwhile, nothing fails.
    assert bench_transport.main([*small, "--out", str(tmp_path), "--plot", str(picture)]) == 0
    records = [json.loads(line) for line in (tmp_path / "transport.jsonl").read_text().splitlines()]
    assert [record["case"] for record in records] == [
        "fills of 0.0625 MiB",
        "fills of 0.25 MiB",
        "round trips of 64 bytes",
    ]
    ways = {MEMCPY, *BASE_OF, *BASE_OF.values()}
    if perftest_program() is not None:
        ways |= {"ucx_perftest tcp", "ucx_perftest shm"}
    for record in records[:2]:
        assert {name.removesuffix(" gb_per_s") for name in record["measured"] if name.endswith("gb_per_s")} == ways
        assert all(spread["median"] > 0 for spread in record["measured"].values())
        assert {check["verdict"] for check in record["checks"]} == {"reported"}
        assert len(record["checks"]) == len(BASE_OF)
    assert {name.removesuffix(" trip_s") for name in records[2]["measured"]} == ways - {MEMCPY}
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(way in printed for way in ways)


def test_fills_that_are_sent_before_the_other_side_has_connected_are_measured_too(tmp_path: Path) -> None:
    small = ["--rounds", "1", "--round-bytes", "1", "--min-bytes", "4096", "--max-bytes", "4096", "--trips", "1"]
    assert bench_transport.main([*small, "--out", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "transport.jsonl").read_text().splitlines()]
    assert {"bare ucx tcp gb_per_s", "bare ucx shm gb_per_s"} <= records[0]["measured"].keys()


@pytest.mark.parametrize("way", TARGETS)
@pytest.mark.parametrize(
    ("size", "below", "verdict"),
    [(MIB, 0.5, "reported"), (4 * MIB, -0.01, "met"), (4 * MIB, 0.1, "missed"), (64 * MIB, MARGIN + 0.01, "failed")],
)
def test_a_way_fails_the_bench_only_far_below_its_target_and_from_4_mib_on(
    way: str, size: int, below: float, verdict: str
) -> None:
    found = {BASE_OF[way]: paces(2.0), way: paces(2.0 * (TARGETS[way] - below))}
    (check,) = bench_transport._checks(size, found)
    assert check.verdict == verdict


def test_sizes_go_up_by_fours_and_every_ring_is_filled_once() -> None:
    config = TransportConfig()
    assert config.sizes == (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    assert [config.load(size).num_fills for size in config.sizes] == [1024, 256, 64, 16, 4]
    assert TransportConfig(round_bytes=1).load(MIB).num_fills == config.depth


@pytest.mark.parametrize(
    "flags", [{"rounds": 0}, {"depth": 0}, {"max_bytes": 1}, {"min_bytes": 2 * MIB, "max_bytes": MIB}]
)
def test_a_setting_out_of_its_range_is_refused(flags: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--"):
        TransportConfig(**flags)


def test_what_perftest_prints_is_read_from_its_last_line_of_figures() -> None:
    header = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr"
    figures = parse_figures(f"{header}\n  50,1.764,10118.661,10120.5,98.83,99.5,99,100\n")
    assert (figures.latency_us, figures.mib_per_s) == (10120.5, 99.5)
    for nonsense in ("", header, "1,2,3", "1,2,3,4,5,6,7,x"):
        with pytest.raises(TransportError, match="no figures"):
            parse_figures(nonsense)
