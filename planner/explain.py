"""Each formula of a plan with its numbers put in, one a line: what --explain prints."""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Answer
from planner.exchange import exchanges_of
from planner.memory import DeviceMemory
from planner.plan import Plan, exchange_s, trainer_setup


def explained(answer: Answer) -> Iterator[str]:
    """Lines of plain text."""
    plan = answer.plan
    for layout in plan.layouts:
        yield f"{layout.name}, {layout.num_nodes} node(s), a training GPU"
        yield from _moments(layout.memory)
        yield from _needed(plan, layout.memory.peak_bytes, layout.needed_bytes)
        yield ""
    yield f"teacher replica, a GPU of {plan.teacher.tp * plan.teacher.pp}"
    yield from _moments(plan.teacher.memory)
    yield from _needed(plan, plan.teacher.memory.peak_bytes, plan.teacher.needed_bytes)
    yield ""
    yield from _pace(plan)


def _moments(memory: DeviceMemory) -> Iterator[str]:
    peak = memory.peak
    for moment in memory.moments:
        mark = "  <- peak" if moment is peak else ""
        yield f"  {moment.name}: {moment.num_bytes:,} bytes{mark}"
        for term in moment.terms:
            yield f"    {term.name:<24} {term.num_bytes:>18,}  = {term.formula}"


def _needed(plan: Plan, peak_bytes: int, needed_bytes: int) -> Iterator[str]:
    settings = plan.question.settings
    yield (
        f"  needed: peak (1 + {settings.fragmentation_frac:g}) + {settings.reserve_gb:g} GB = "
        f"{peak_bytes:,} x {1 + settings.fragmentation_frac:g} + {settings.reserve_gb * 1e9:,.0f} = {needed_bytes:,}"
    )


def _pace(plan: Plan) -> Iterator[str]:
    question, settings, teacher, stages = plan.question, plan.question.settings, plan.teacher, plan.stages
    flops, steady = plan.flops, plan.pace
    yield "pace"
    yield f"  student, FLOPs a token: body {flops.body:.4g} + attention {flops.attention:.4g} + loss {flops.loss:.4g}"
    if settings.student_tokens_per_s is None:
        yield (
            f"  student: {question.student_flops_per_s:.4g} FLOP/s x {settings.student_mfu:g} / {flops.total:.4g} = "
            f"{plan.student_tokens_per_s:,.0f} tokens/s a GPU"
        )
        yield from _exchanges(plan)
    else:
        yield f"  student: {plan.student_tokens_per_s:,.0f} tokens/s a GPU, as measured"
    if settings.teacher_tokens_per_s is None:
        yield (
            f"  teacher: {question.teacher_flops_per_s(question.teacher_gpu):.4g} FLOP/s x {settings.teacher_mfu:g} x "
            f"{teacher.tp * teacher.pp} GPUs / {teacher.flops_per_token:.4g} = {teacher.tokens_per_s:,.0f} tokens/s"
        )
    else:
        yield f"  teacher: {teacher.tokens_per_s:,.0f} tokens/s a replica, as measured"
    row = plan.token_bytes.hidden
    rate = question.link.payload_bytes_per_s
    yield f"  link: R d_t b / rate = {settings.rows:,} x {row:,} / {rate:,.0f} = {stages.link_s:.4g} s"
    shared = f"{stages.num_trainers} trainers / {stages.num_links} links"
    yield f"  link stage: {stages.link_s:.4g} s x {shared} = {stages.busiest_link_s:.4g} s"
    yield f"  teacher stage: {stages.teacher_s:.4g} s x {stages.num_trainers} trainers / {stages.num_replicas} replicas"
    slowest = f"the slowest of {stages.num_trainers}: {stages.slowest_student_s:.4g} s"
    yield f"  student stage: {stages.student_s:.4g} s, {slowest}"
    yield (
        f"  depth: (fetch {stages.fetch_s:.4g} + step {stages.slowest_student_s:.4g}) / {stages.depth} slots = "
        f"{steady.by_stage_s['depth']:.4g} s"
    )
    yield f"  microbatch: the largest of these = {steady.step_s:.4g} s ({steady.bottleneck})"


def _exchanges(plan: Plan) -> Iterator[str]:
    question, num_trainers = plan.question, plan.question.settings.num_trainers
    for each in exchanges_of(trainer_setup(question, "disagg", "fused"), num_trainers=num_trainers):
        took_s = exchange_s(question, each)
        rate = f"at {each.num_bytes / took_s:,.0f}/s: {took_s:.4g} s"
        yield f"  {each.name}: {each.formula} = {each.num_bytes:,} bytes, {rate}"
