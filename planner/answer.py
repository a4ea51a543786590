"""All that one question is answered with, and the same as plain JSON types: `docs/planner-json.md` says every key."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from planner.architecture import ModelShape
from planner.frontier import Frontier, Point, frontier_of, sweep_of
from planner.memory import DeviceMemory
from planner.plan import LayoutPlan, Plan, Question, TeacherPlan, plan_of
from planner.simulate import Jitter, Simulated, simulate
from planner.verdict import Verdict, verdict_of

#: Raised when a key changes its meaning or goes away; new keys do not raise it.
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """simulated: None unless asked for; sweep: empty unless asked for."""

    plan: Plan
    verdict: Verdict
    frontiers: tuple[Frontier, ...]
    simulated: Simulated | None = None
    sweep: tuple[Point, ...] = ()


def answer_of(question: Question) -> Answer:
    """Raises PlanError: sizes or groups that can't be."""
    settings, plan = question.settings, plan_of(question)
    simulated = None
    if settings.simulate:
        frac = settings.jitter_frac
        jitter = Jitter(teacher_frac=frac, link_frac=frac, student_frac=frac, in_step=True)
        simulated = simulate(plan.stages, jitter=jitter)
    return Answer(
        plan=plan,
        verdict=verdict_of(plan),
        frontiers=frontier_of(question),
        simulated=simulated,
        sweep=() if settings.sweep == "none" else sweep_of(question),
    )


def record_of(answer: Answer) -> dict[str, object]:
    """The answer in plain types, for JSON."""
    plan, question = answer.plan, answer.plan.question
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": asdict(answer.verdict),
        "settings": {**vars(question.settings)},
        "student_model": _model(question.student),
        "teacher_model": _model(question.teacher),
        "layouts": [_layout(layout) for layout in plan.layouts],
        "layouts_by_nodes": [_layout(layout) for layout in plan.by_nodes],
        "teacher_replica": _replica(plan.teacher),
        "traffic": _traffic(plan),
        "pace": _pace(plan),
        "frontier": [_frontier(frontier) for frontier in answer.frontiers],
        "simulation": None if answer.simulated is None else asdict(answer.simulated),
        "sweep": [point_record(point) for point in answer.sweep],
    }


def _model(shape: ModelShape) -> dict[str, object]:
    return {
        "name": shape.name,
        "model_type": shape.model_type,
        "num_params": shape.num_params,
        "num_active_params": shape.active_params,
        "num_params_by_component": shape.components(),
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_layers": shape.num_layers,
        "is_tied": shape.is_tied,
    }


def _memory(memory: DeviceMemory) -> dict[str, object]:
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_moment": memory.peak.name,
        "bound_bytes": memory.bound_bytes,
        "bytes_by_moment": {
            moment.name: {term.name: term.num_bytes for term in moment.terms} for moment in memory.moments
        },
    }


def _layout(layout: LayoutPlan) -> dict[str, object]:
    return {
        "layout": layout.layout,
        "loss": layout.loss,
        "num_nodes": layout.num_nodes,
        "fits": layout.fits,
        "needed_bytes": layout.needed_bytes,
        "capacity_bytes": layout.capacity_bytes,
        "num_gpus": layout.num_gpus,
        "step_s": layout.step_s,
        "tokens_per_s": layout.tokens_per_s,
        "gpu_s_per_mtoken": layout.gpu_s_per_mtoken,
        "teacher_gather_s": layout.gather_s,
        "memory": _memory(layout.memory),
    }


def _replica(teacher: TeacherPlan) -> dict[str, object]:
    return {
        "tp": teacher.tp,
        "pp": teacher.pp,
        "num_replicas": teacher.num_replicas,
        "balanced_replicas": teacher.balanced_replicas,
        "num_gpus": teacher.num_gpus,
        "fits": teacher.fits,
        "needed_bytes": teacher.needed_bytes,
        "capacity_bytes": teacher.capacity_bytes,
        "tokens_per_s": teacher.tokens_per_s,
        "flops_per_token": teacher.flops_per_token,
        "memory": _memory(teacher.memory),
    }


def _traffic(plan: Plan) -> dict[str, object]:
    settings, each = plan.question.settings, plan.token_bytes
    rows = settings.rows * settings.num_trainers * settings.grad_accum
    return {
        "hidden_bytes_per_row": each.hidden,
        "logits_bytes_per_row": each.logits,
        "topk_bytes_per_row": each.topk,
        "topk_k": each.k,
        "topk_break_even_k": each.break_even_k,
        "rows_per_step": rows,
        "hidden_bytes_per_step": rows * each.hidden,
        "logits_bytes_per_step": rows * each.logits,
        "topk_bytes_per_step": rows * each.topk,
        "needed_link_bytes_per_s": plan.needed_bytes_per_s,
        "link_bytes_per_s": plan.question.link.payload_bytes_per_s * settings.nodes,
    }


def _pace(plan: Plan) -> dict[str, object]:
    steady = plan.pace
    return {
        "student_flops_per_token": plan.flops.total,
        "student_flops_per_token_by_part": asdict(plan.flops),
        "student_tokens_per_s_per_gpu": plan.student_tokens_per_s,
        "stages": asdict(plan.stages),
        "microbatch_s": steady.step_s,
        "step_s": steady.step_s * plan.question.settings.grad_accum,
        "microbatch_s_by_stage": dict(steady.by_stage_s),
        "bottleneck": steady.bottleneck,
        "bottleneck_over_next": steady.margin,
        "student_stall_frac": steady.student_stall_frac,
        "teacher_stall_frac": steady.teacher_stall_frac,
        "link_busy_frac": steady.link_busy_frac,
        "needed_ring_depth": plan.needed_depth,
    }


def _frontier(frontier: Frontier) -> dict[str, object]:
    return {
        "layout": frontier.layout,
        "loss": frontier.loss,
        "largest_teacher_params": frontier.teacher_params,
        "teacher_is_unlimited": frontier.teacher_is_open,
        "largest_student_params": frontier.student_params,
        "largest_tokens_per_gpu": frontier.tokens,
    }


def point_record(point: Point) -> dict[str, object]:
    """One point of a sweep."""
    return asdict(point)
