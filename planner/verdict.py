"""Which layout to take, in words: the fork between one node's worth of memory and a teacher that needs its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.errors import PlanError
from planner.plan import LayoutPlan, Plan, Question, trainer_setup
from planner.trainer_memory import trainer_memory

Choice = Literal["colocated", "disaggregated", "nothing_fits"]
#: A layout that costs so much more GPU time than the other is not "enough", though it fits.
DEARER_FRAC = 0.25
#: Nodes that are tried when the asked ones are too few.
MAX_NODES = 64


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """reasons, warnings: sentences. nodes_needed: training nodes with which the disaggregated layout fits; None where
    not even MAX_NODES are enough, or the asked ones are."""

    choice: Choice
    headline: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    nodes_needed: int | None = None


def gb(num_bytes: float) -> str:
    """In 1e9 bytes, or in 1e6 where that many would read as none."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 5e7 or not num_bytes else f"{num_bytes / 1e6:.3g} MB"


def verdict_of(plan: Plan) -> Verdict:
    """The verdict on the asked number of nodes."""
    return replace(_choice(plan), warnings=tuple(_warnings(plan.question)))


def _warnings(question: Question) -> list[str]:
    """What may make the whole plan void, whatever fits."""
    teacher, student = question.teacher, question.student
    said = []
    if teacher.vocab_size != student.vocab_size:
        said.append(
            f"{teacher.name} has {teacher.vocab_size:,} columns of vocabulary, {student.name} {student.vocab_size:,}: "
            f"only models of one tokenizer can be distilled; make sure that the difference is padding."
        )
    if teacher.num_params < student.num_params:
        said.append("The teacher is smaller than the student: are --teacher and --student the wrong way round?")
    return said


def _choice(plan: Plan) -> Verdict:
    full, fused = plan.layout("colocated", "full"), plan.layout("colocated", "fused")
    disagg = plan.layout("disagg", "fused")
    split_works = disagg.fits and plan.teacher.fits
    if fused.fits and not (split_works and _dearer(fused, disagg)):
        return Verdict(
            choice="colocated",
            headline="Colocated with the fused loss is enough.",
            reasons=(*_why_colocated(fused, full), _pace_of_both(fused, disagg, plan)),
        )
    if split_works:
        return Verdict(
            choice="disaggregated",
            headline="Disaggregate: teacher and student on GPUs of their own.",
            reasons=(*_why_split(fused, disagg, plan), _replicas(plan), _who_waits(plan)),
        )
    nodes = None if disagg.fits else _nodes_needed(plan.question)
    return Verdict(
        choice="nothing_fits",
        headline="Nothing fits on these GPUs.",
        reasons=tuple(_why_nothing(plan, disagg, nodes)),
        nodes_needed=nodes,
    )


def _dearer(fused: LayoutPlan, disagg: LayoutPlan) -> bool:
    return fused.gpu_s_per_mtoken > disagg.gpu_s_per_mtoken * (1 + DEARER_FRAC)


def _room(layout: LayoutPlan) -> str:
    return f"{gb(layout.needed_bytes)} of {gb(layout.capacity_bytes)} a GPU"


def _why_colocated(fused: LayoutPlan, full: LayoutPlan) -> list[str]:
    said = [f"It needs {_room(fused)}."]
    if full.fits:
        said.append(f"Even the full loss would fit ({_room(full)}), though at a higher price.")
    else:
        said.append(f"The full loss would not fit ({_room(full)}): the fused one makes the difference.")
    return said


def _pace_of_both(fused: LayoutPlan, disagg: LayoutPlan, plan: Plan) -> str:
    text = (
        f"{fused.num_gpus} GPUs train {fused.tokens_per_s:,.0f} tokens/s ({fused.gpu_s_per_mtoken:,.0f} GPU s per "
        f"million tokens)"
    )
    if not (disagg.fits and plan.teacher.fits):
        return f"{text}."
    return (
        f"{text}; disaggregated, {disagg.num_gpus} GPUs would train {disagg.tokens_per_s:,.0f} "
        f"({disagg.gpu_s_per_mtoken:,.0f} GPU s)."
    )


def _why_split(fused: LayoutPlan, disagg: LayoutPlan, plan: Plan) -> list[str]:
    room = f"Disaggregated, the trainer needs {_room(disagg)}."
    if not fused.fits:
        teacher = _term(fused, "teacher_weights")
        share = f", {gb(teacher)} of that for its share of the teacher's weights" if teacher else ""
        return [f"Colocated, even the fused loss needs {_room(fused)}{share}.", room]
    text = (
        f"Colocated would fit ({_room(fused)}), but costs {fused.gpu_s_per_mtoken:,.0f} GPU s per million tokens "
        f"against {disagg.gpu_s_per_mtoken:,.0f}"
    )
    if fused.gather_s > plan.stages.student_s / 4:
        text += (
            f": every pass of the teacher gathers its weights from all ranks, {fused.gather_s:.2f} s against "
            f"{plan.stages.student_s:.2f} s of training"
        )
    return [f"{text}.", room]


def _term(layout: LayoutPlan, name: str) -> int:
    return sum(term.num_bytes for term in layout.memory.peak.terms if term.name == name)


def _replicas(plan: Plan) -> str:
    teacher, balanced = plan.teacher, plan.teacher.balanced_replicas
    word = "replica" if teacher.num_replicas == 1 else "replicas"
    devices = f"{teacher.tp * teacher.pp} GPU" + ("s" if teacher.tp * teacher.pp > 1 else "")
    text = f"Teacher: {teacher.num_replicas:,} {word} of {devices} each"
    if teacher.num_replicas != balanced:
        text += f" ({balanced:,} would keep the trainers busy)"
    link = plan.needed_bytes_per_s * 8 / 1e9
    shown = f"{link:.2g}" if link < 10 else f"{link:,.0f}"
    return f"{text}; the states take {shown} Gbit/s, full logits would take {link * _ratio(plan):,.0f}."


def _ratio(plan: Plan) -> float:
    return plan.token_bytes.logits_over_hidden


def _who_waits(plan: Plan) -> str:
    steady = plan.pace
    names = {"teacher": "teachers", "link": "link", "student": "trainers", "depth": "depth of the ring"}
    text = f"The {names[steady.bottleneck]} set the pace" if steady.bottleneck != "link" else "The link sets the pace"
    if steady.bottleneck == "depth":
        text = f"The depth of the ring sets the pace: {plan.needed_depth} slots would hide the teacher"
    return (
        f"{text}; trainers wait {steady.student_stall_frac:.0%} of the time, teachers {steady.teacher_stall_frac:.0%}."
    )


def _nodes_needed(question: Question) -> int | None:
    """The fewest training nodes with which the disaggregated trainer fits."""
    settings = question.settings
    for nodes in range(settings.nodes + 1, MAX_NODES + 1):
        try:
            wider = replace(question, settings=replace(settings, nodes=nodes))
        except PlanError:
            continue
        memory = trainer_memory(trainer_setup(wider, "disagg", "fused"))
        if wider.needed(memory) <= question.gpu.memory_bytes:
            return nodes
    return None


def _why_nothing(plan: Plan, disagg: LayoutPlan, nodes: int | None) -> list[str]:
    said = []
    settings = plan.question.settings
    if not disagg.fits:
        largest = sorted(disagg.memory.peak.terms, key=lambda term: term.num_bytes, reverse=True)[:3]
        parts = ", ".join(f"{term.name.replace('_', ' ')} {gb(term.num_bytes)}" for term in largest)
        said.append(f"Even disaggregated, the trainer needs {_room(disagg)}; most of it: {parts}.")
        if nodes is not None:
            said.append(f"{nodes} training nodes would be enough.")
        remedies = [] if settings.checkpointing else ["--checkpointing"]
        remedies += ["fewer --tokens-per-gpu"] if settings.tokens_per_gpu > 1024 else []
        remedies += [] if settings.vocab_parallel > 1 or settings.num_trainers == 1 else ["--vocab-parallel"]
        remedies += [] if settings.optimizer == "adamw8bit" else ["--optimizer adamw8bit"]
        helps = "What helps" if nodes is None else "What also helps"
        said.append(f"{helps}: {', '.join(remedies)}." if remedies else "A GPU with more memory is needed.")
    if not plan.teacher.fits:
        teacher = plan.teacher
        said.append(
            f"A replica of the teacher needs {gb(teacher.needed_bytes)} of {gb(teacher.capacity_bytes)} a GPU on "
            f"{teacher.tp * teacher.pp} GPUs: raise --teacher-tp or --teacher-pp, or take larger GPUs."
        )
    return said
