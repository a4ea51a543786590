"""report.html: everything in one file, nothing fetched from anywhere; report.json, the same for programs; and the main
table and picture by themselves, for other pages: summary.md and overview.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import jinja2

from bench.claims import charts
from bench.claims.section import Section

_VERDICTS = {"holds": "holds here", "fails": "does not hold here", "open": "reported"}
TEMPLATE = Path(__file__).with_name("page.html.j2")


def write(
    sections: Sequence[Section],
    *,
    out: Path,
    command: str,
    about: str,
    wall_s: float,
    environment: Mapping[str, object],
) -> Path:
    """All files in `out`; returns the page. `environment`: bench.records.environment()."""
    machine = f"{environment['cpu']}, {environment['cores']} cores"
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE.read_text())
    text = page.render(
        sections=sections,
        verdicts=_VERDICTS,
        machine=machine,
        about=about,
        command=command,
        minutes=f"{wall_s / 60:.1f}",
        environment=environment,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    path.write_text(text, encoding="utf-8")
    facts = {
        "environment": dict(environment),
        "command": command,
        "wall_s": wall_s,
        "claims": [_plain(section) for section in sections],
    }
    (out / "report.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (out / "summary.md").write_text(_summary(sections), encoding="utf-8")
    panels = [section.overview for section in sections if section.overview is not None]
    if panels:
        (out / "overview.png").write_bytes(charts.overview(panels))
    return path


def _summary(sections: Sequence[Section]) -> str:
    """The page's first table, as Markdown."""
    rows = [
        f"| {section.title} | {_VERDICTS[section.verdict]} | {section.number} | {section.measured} |"
        for section in sections
    ]
    return "\n".join(["| Claim | | Number | What the number is |", "|---|---|---|---|", *rows, ""])


def _plain(section: Section) -> dict[str, object]:
    """Without the pictures."""
    found = asdict(section)
    del found["charts"], found["overview"]
    return found
