"""The answer for people: a verdict, a table of the layouts, what the trainer's memory is made of, pace and frontier."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.answer import Answer
from planner.frontier import Frontier
from planner.hardware import GPUS, LINKS
from planner.models import PRESETS, find_model
from planner.plan import LayoutPlan, Plan
from planner.verdict import gb

_NAMES = {
    "colocated+full": "colocated full",
    "colocated+fused": "colocated fused",
    "disagg+fused": "disagg fused",
}
_COLOURS = {"colocated": "green", "disaggregated": "cyan", "nothing_fits": "red"}


def console() -> Console:
    """What is printed there is text and no markup: a model's name may be a path with brackets in it."""
    return Console(markup=False, emoji=False)


def print_answer(answer: Answer, out: Console) -> None:
    """All tables, and the verdict first."""
    plan, verdict = answer.plan, answer.verdict
    out.print(_heading(plan), highlight=False)
    out.print(verdict.headline, style=f"bold {_COLOURS[verdict.choice]}", highlight=False)
    for reason in verdict.reasons:
        out.print(_indented(reason), highlight=False)
    for warning in verdict.warnings:
        out.print(_indented(warning, style="yellow"), highlight=False)
    out.print()
    out.print(_layouts(plan))
    out.print(_memory(plan))
    out.print(_pipeline(answer))
    out.print(_frontiers(answer.frontiers, plan))
    out.print(
        "Estimates from closed forms (docs/cost-models.md); --explain shows each with its numbers.",
        style="dim",
        highlight=False,
    )


def _indented(text: str, *, style: str = "") -> Padding:
    """Its further lines as well."""
    return Padding(Text(text, style=style), (0, 0, 0, 2), expand=False)


def _heading(plan: Plan) -> Text:
    question, settings = plan.question, plan.question.settings
    teacher, student = question.teacher, question.student
    nodes = f"{settings.nodes} node{'s' if settings.nodes > 1 else ''} of " if settings.nodes > 1 else ""
    return Text.assemble(
        (teacher.name, "bold"),
        f" ({_params(teacher.num_params)}, {_params(teacher.active_params)} active) teaches ",
        (student.name, "bold"),
        f" ({_params(student.num_params)}) on {nodes}{settings.gpus} x {question.gpu.name} "
        f"({gb(question.gpu.memory_bytes)}), {settings.tokens_per_gpu:,} tokens a GPU",
    )


def _params(count: int) -> str:
    return f"{count / 1e12:.2f}T" if count >= 1e12 else f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _layouts(plan: Plan) -> Table:
    capacity = gb(plan.question.gpu.memory_bytes)
    table = _table(
        f"Layouts (GB a GPU, of {capacity}; GPUs with the teacher's)",
        *("layout", "nodes", "peak", "needed", "fits", "GPUs", "tokens/s", "GPU s/M"),
    )
    for layout in plan.by_nodes:
        table.add_row(
            _NAMES[layout.name],
            str(layout.num_nodes),
            f"{layout.memory.peak_bytes / 1e9:.1f}",
            f"{layout.needed_bytes / 1e9:.1f}",
            Text("yes", style="green") if layout.fits else Text("no", style="red"),
            str(layout.num_gpus),
            f"{layout.tokens_per_s:,.0f}",
            f"{layout.gpu_s_per_mtoken:,.0f}",
        )
    return table


def _memory(plan: Plan) -> Table:
    layouts: Sequence[LayoutPlan] = plan.layouts
    table = _table("Memory of a training GPU at its peak, GB", "", *(_NAMES[layout.name] for layout in layouts))
    by_layout = [{term.name: term.num_bytes for term in layout.memory.peak.terms} for layout in layouts]
    names = dict.fromkeys(name for terms in by_layout for name in terms)
    for name in names:
        values = [terms.get(name) for terms in by_layout]
        table.add_row(name.replace("_", " "), *("" if value is None else f"{value / 1e9:.2f}" for value in values))
    table.add_section()
    table.add_row("moment of the peak", *(layout.memory.peak.name.replace("_", " ") for layout in layouts))
    table.add_row("peak", *(f"{layout.memory.peak_bytes / 1e9:.2f}" for layout in layouts))
    table.add_row("needed", *(f"{layout.needed_bytes / 1e9:.2f}" for layout in layouts))
    return table


def _pipeline(answer: Answer) -> Table:
    plan = answer.plan
    steady, stages, teacher, each = plan.pace, plan.stages, plan.teacher, plan.token_bytes
    settings = plan.question.settings
    table = Table(title="The disaggregated pipeline", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    replicas = f"{teacher.num_replicas:,} x {teacher.tp * teacher.pp} GPUs (tp {teacher.tp}, pp {teacher.pp})"
    rows = [
        ("teacher replicas", replicas),
        ("a replica's GPU", f"{gb(teacher.needed_bytes)} of {gb(teacher.capacity_bytes)}"),
        ("replicas that keep trainers busy", f"{teacher.balanced_replicas:,}"),
        ("a replica computes", f"{teacher.tokens_per_s:,.0f} tokens/s"),
        ("a training GPU computes", f"{plan.student_tokens_per_s:,.0f} tokens/s"),
        ("a row's states / logits / top-k", f"{each.hidden:,} / {each.logits:,} / {each.topk:,} bytes"),
        ("top-k costs as much at", f"k = {each.break_even_k}"),
        ("link needed, all trainers", f"{plan.needed_bytes_per_s * 8 / 1e9:,.2f} Gbit/s"),
        ("link", f"{plan.question.link.name} x {settings.nodes}, busy {steady.link_busy_frac:.1%}"),
        ("teachers / link / trainer alone", _stage_times(plan)),
        ("microbatch, steady state", f"{steady.step_s:.3f} s, set by: {steady.bottleneck}"),
        ("optimizer step", f"{steady.step_s * settings.grad_accum:.3f} s"),
        ("trainers wait / teachers wait", f"{steady.student_stall_frac:.1%} / {steady.teacher_stall_frac:.1%}"),
        ("ring depth: given / needed", f"{stages.depth} / {plan.needed_depth}"),
    ]
    if answer.simulated is not None:
        found = answer.simulated
        rows.append(("microbatch, simulated", f"{found.step_s:.3f} s (jitter {settings.jitter_frac:.0%})"))
        rows.append(("trainers wait, simulated", f"{found.student_stall_frac:.1%}"))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _stage_times(plan: Plan) -> str:
    times = plan.pace.by_stage_s
    return f"{times['teacher']:.3f} / {times['link']:.3f} / {times['student']:.3f} s"


def _frontiers(frontiers: Sequence[Frontier], plan: Plan) -> Table:
    table = _table(
        "The most that fits, all else as asked (models deeper or shallower than these)",
        "layout",
        "teacher",
        "student",
        "tokens a GPU",
    )
    for frontier in frontiers:
        teacher = "none" if frontier.teacher_params is None else _params(frontier.teacher_params)
        table.add_row(
            _NAMES[f"{frontier.layout}+{frontier.loss}"],
            "any" if frontier.teacher_is_open else teacher,
            "none" if frontier.student_params is None else _params(frontier.student_params),
            "none" if frontier.tokens is None else f"{frontier.tokens:,}",
        )
    return table


def print_presets(out: Console) -> None:
    """Models, GPUs and links that are known by name."""
    models = _table("Models", "name", "parameters", "active", "hidden", "vocabulary", "layers")
    for name in PRESETS:
        shape = find_model(name, flag="--teacher")
        models.add_row(
            name,
            f"{shape.num_params:,}",
            _params(shape.active_params),
            f"{shape.hidden_size:,}",
            f"{shape.vocab_size:,}",
            str(shape.num_layers),
        )
    out.print(models)
    gpus = _table("GPUs", "name", "memory", "bf16 TFLOP/s", "fp32", "to its peers")
    for gpu in GPUS.values():
        peers = f"{gpu.peer_bytes_per_s / 1e9:.0f} GB/s"
        rates = (f"{rate / 1e12:g}" for rate in (gpu.flops_per_s, gpu.fp32_flops_per_s))
        gpus.add_row(gpu.name, gb(gpu.memory_bytes), *rates, peers)
    out.print(gpus)
    links = _table("Links", "name", "Gbit/s", "payload", "round trip")
    for link in LINKS.values():
        links.add_row(
            link.name,
            f"{link.bytes_per_s * 8 / 1e9:.0f}",
            f"{link.payload_bytes_per_s / 1e9:.2f} GB/s",
            f"{link.latency_s * 1e6:.0f} us",
        )
    out.print(links)
