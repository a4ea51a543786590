"""The whole answer: memory and pace of every layout, the teacher's replicas, the link, the ring, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.activations import Arithmetic
from planner.architecture import ModelShape
from planner.errors import PlanError
from planner.exchange import Exchange, exchanges_of, teacher_gathering
from planner.hardware import Gpu, Link, find_gpu, find_link
from planner.memory import DeviceMemory
from planner.models import find_model
from planner.pace import (
    Pace,
    Stages,
    StudentFlops,
    expected_largest,
    needed_bytes_per_s,
    needed_depth,
    needed_replicas,
    pace,
    student_flops,
    teacher_flops,
)
from planner.settings import WEIGHT_BYTES, PlanSettings
from planner.teacher_memory import TeacherSetup, fewest_devices, teacher_memory
from planner.traffic import TokenBytes, states_bytes, token_bytes
from planner.trainer_memory import Layout, Loss, TrainerSetup, loss_plan, loss_shape, trainer_memory

#: The three ways, from the most demanding to the least.
LAYOUTS: tuple[tuple[Layout, Loss], ...] = (("colocated", "full"), ("colocated", "fused"), ("disagg", "fused"))
#: Every number of nodes is answered up to here; past it only twice as many each time, and those that were asked for.
EACH_NODES = 8


@dataclass(frozen=True, kw_only=True)
class Question:
    """The settings with names looked up."""

    settings: PlanSettings
    student: ModelShape
    teacher: ModelShape
    gpu: Gpu
    teacher_gpu: Gpu
    link: Link
    fabric: Link

    @property
    def student_flops_per_s(self) -> float:
        """Peak of a training GPU at the student's products."""
        return self.gpu.rate(element_bytes=WEIGHT_BYTES[self.settings.precision])

    def teacher_flops_per_s(self, gpu: Gpu) -> float:
        """Peak of a GPU at the teacher's products."""
        return gpu.rate(element_bytes=self.settings.teacher_bytes)

    def needed(self, memory: DeviceMemory) -> int:
        """What a device must have: the peak, what the allocator loses, and the reserve."""
        settings = self.settings
        return int(memory.peak_bytes * (1 + settings.fragmentation_frac) + settings.reserve_gb * 1e9)


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """One layout on the GPUs that train. step_s: of one microbatch; num_gpus: teachers' GPUs among them.

    gather_s: to gather a colocated teacher's shards for one pass."""

    layout: Layout
    loss: Loss
    num_nodes: int
    memory: DeviceMemory
    needed_bytes: int
    capacity_bytes: int
    num_gpus: int
    step_s: float
    tokens_per_s: float
    gather_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes

    @property
    def name(self) -> str:
        return f"{self.layout}+{self.loss}"

    @property
    def gpu_s_per_mtoken(self) -> float:
        return self.num_gpus * 1e6 / self.tokens_per_s


@dataclass(frozen=True, kw_only=True)
class TeacherPlan:
    """The replicas of the disaggregated layout. num_replicas: those that are planned with; balanced_replicas: those
    that the trainers could use."""

    tp: int
    pp: int
    num_replicas: int
    balanced_replicas: int
    memory: DeviceMemory
    needed_bytes: int
    capacity_bytes: int
    tokens_per_s: float
    flops_per_token: float

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.num_replicas


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is printed. layouts: of the asked number of nodes; by_nodes: of
    `node_counts`."""

    question: Question
    layouts: tuple[LayoutPlan, ...]
    by_nodes: tuple[LayoutPlan, ...]
    teacher: TeacherPlan
    flops: StudentFlops
    student_tokens_per_s: float
    stages: Stages
    pace: Pace
    needed_depth: int
    needed_bytes_per_s: float
    token_bytes: TokenBytes

    def layout(self, layout: Layout, loss: Loss) -> LayoutPlan:
        return next(plan for plan in self.layouts if (plan.layout, plan.loss) == (layout, loss))


def question_of(settings: PlanSettings) -> Question:
    """Raises PlanError: a missing or unknown model, an unknown preset, sizes that don't go together."""
    if settings.teacher is None or settings.student is None:
        missing = [f"--{name}" for name in ("teacher", "student") if getattr(settings, name) is None]
        raise PlanError(f"{' and '.join(missing)} not given; allowed: a preset (--list), a directory or a config.json")
    student, teacher = find_model(settings.student, flag="--student"), find_model(settings.teacher, flag="--teacher")
    heads = max(layer.attention.num_heads for layer in student.layers)
    if heads % settings.student_tp:
        raise PlanError(f"--student-tp {settings.student_tp}: {student.name} has {heads} heads; allowed: a divisor")
    gpu = find_gpu(settings.gpu, flag="--gpu")
    teacher_gpu = find_gpu(settings.teacher_gpu, flag="--teacher-gpu") if settings.teacher_gpu else gpu
    if settings.gpu_memory_gb is not None:
        gpu = replace(gpu, memory_bytes=int(settings.gpu_memory_gb * 1e9))
    if settings.gpu_tflops is not None:
        stated = settings.gpu_tflops * 1e12
        is_fp32 = settings.precision == "fp32"
        gpu = replace(gpu, fp32_flops_per_s=stated) if is_fp32 else replace(gpu, flops_per_s=stated)
    link = find_link(settings.link, flag="--link")
    if settings.link_gbit is not None:
        link = replace(link, name=f"{settings.link_gbit:g} Gbit/s", bytes_per_s=settings.link_gbit * 1e9 / 8)
    if settings.link_latency_us is not None:
        link = replace(link, latency_s=settings.link_latency_us * 1e-6)
    return Question(
        settings=settings,
        student=student,
        teacher=teacher,
        gpu=gpu,
        teacher_gpu=teacher_gpu if settings.teacher_gpu else gpu,
        link=link,
        fabric=find_link(settings.fabric, flag="--fabric"),
    )


def trainer_setup(question: Question, layout: Layout, loss: Loss) -> TrainerSetup:
    """One training GPU in numbers. Raises PlanError: a loss workspace too small for any tile."""
    settings = question.settings
    arithmetic: Arithmetic = "bf16"
    if settings.precision == "fp32":
        arithmetic = "fp32"
    elif settings.shards == 1 and settings.master == "fp32":
        arithmetic = "autocast"
    setup = TrainerSetup(
        student=question.student,
        teacher=question.teacher,
        layout=layout,
        loss=loss,
        tokens=settings.tokens_per_gpu,
        rows=settings.rows,
        sequence_tokens=settings.sequence_tokens,
        arithmetic=arithmetic,
        element_bytes=2 if settings.master == "bf16" else 4,
        is_8bit=settings.optimizer == "adamw8bit",
        shards=settings.shards,
        tp=settings.student_tp,
        # Full logits are never cut.
        vocab_shards=1 if loss == "full" else settings.vocab_parallel,
        checkpointing=settings.checkpointing,
        grad_accum=settings.grad_accum,
        wire_bytes=settings.teacher_bytes,
        teacher_bytes=settings.teacher_bytes,
        ring_depth=settings.ring_depth,
        ring_spares=settings.ring_spares,
        slots_on_device=settings.slots == "device",
        workspace_bytes=settings.workspace_bytes,
        full_logit_bytes=settings.full_logit_bytes,
    )
    if loss == "full":
        return setup
    try:
        # The loss chooses by what is free when it is first called.
        taken = next(moment for moment in trainer_memory(setup).moments if moment.name == "loss")
        without = sum(term.num_bytes for term in taken.terms if term.name != "loss_workspace")
        return replace(setup, free_bytes=max(0, question.gpu.memory_bytes - without))
    except ValueError as error:
        raise PlanError(f"--workspace-bytes: {error}") from error


def plan_of(question: Question) -> Plan:
    """Raises PlanError: impossible parallelism, or a teacher that fits no node."""
    settings = question.settings
    setup = trainer_setup(question, "disagg", "fused")
    shape, mode = loss_shape(setup), loss_plan(setup).mode
    flops = student_flops(
        question.student,
        shape,
        tokens=settings.tokens_per_gpu,
        sequence_tokens=settings.sequence_tokens,
        checkpointing=settings.checkpointing,
        mode=mode,
    )
    student_rate = settings.student_tokens_per_s or question.student_flops_per_s * settings.student_mfu / flops.total
    teacher = _teacher_plan(question, student_rate)
    layouts = tuple(
        _layout_plan(question, layout, loss, nodes, student_rate, teacher)
        for nodes in node_counts(settings)
        for layout, loss in LAYOUTS
    )
    stages = _stages(question, student_rate, teacher)
    steady = pace(stages)
    return Plan(
        question=question,
        layouts=layouts[-len(LAYOUTS) :],
        by_nodes=layouts,
        teacher=teacher,
        flops=flops,
        student_tokens_per_s=student_rate,
        stages=stages,
        pace=steady,
        needed_depth=needed_depth(stages, jitter_s=3 * settings.jitter_frac * stages.fetch_s),
        needed_bytes_per_s=needed_bytes_per_s(
            microbatch_bytes=_microbatch_bytes(question), step_s=stages.student_s, num_trainers=settings.num_trainers
        ),
        token_bytes=token_bytes(question.teacher, wire_bytes=settings.teacher_bytes, k=settings.top_k),
    )


def node_counts(settings: PlanSettings) -> list[int]:
    """1 to the asked number, in doubling steps past EACH_NODES, without those that don't hold the groups asked for."""
    asked, counts = settings.nodes, []
    doubled = [EACH_NODES << power for power in range(1, asked.bit_length())]
    for nodes in [*range(1, min(asked - 1, EACH_NODES) + 1), *(count for count in doubled if count < asked), asked]:
        try:
            replace(settings, nodes=nodes)
        except PlanError:
            continue
        counts.append(nodes)
    return counts


def _microbatch_bytes(question: Question) -> int:
    settings = question.settings
    return states_bytes(settings.rows, question.teacher.hidden_size, settings.teacher_bytes)


def _student_s(question: Question, rate: float, setup: TrainerSetup) -> float:
    """Of one microbatch on student_tp GPUs: computing, or what they move between each other, whichever is longer."""
    settings = question.settings
    compute_s = settings.tokens_per_gpu / (rate * settings.student_tp)
    if settings.student_tokens_per_s is not None:
        return compute_s
    exchanges = exchanges_of(setup, num_trainers=settings.num_trainers)
    return max(compute_s, sum(exchange_s(question, exchange) for exchange in exchanges))


def exchange_s(question: Question, exchange: Exchange) -> float:
    """At the rate of a node's GPUs, or of a GPU's port to other nodes where a group has members there."""
    if exchange.crosses_nodes(gpus=question.settings.gpus, nodes=question.settings.nodes):
        return exchange.num_bytes / question.fabric.payload_bytes_per_s
    return exchange.num_bytes / question.gpu.peer_bytes_per_s


def _teacher_plan(question: Question, student_rate: float) -> TeacherPlan:
    settings, teacher, gpu = question.settings, question.teacher, question.teacher_gpu
    setup = TeacherSetup(
        teacher=teacher,
        tp=settings.teacher_tp or 1,
        pp=settings.teacher_pp,
        element_bytes=settings.teacher_bytes,
        wire_bytes=settings.teacher_bytes,
        batch_tokens=settings.teacher_batch_tokens,
        sequence_tokens=settings.sequence_tokens,
    )
    if not settings.teacher_tp:
        room = int((gpu.memory_bytes - settings.reserve_gb * 1e9) / (1 + settings.fragmentation_frac))
        setup = fewest_devices(setup, capacity_bytes=room, devices_per_node=settings.teacher_gpus_per_node)
    flops = teacher_flops(teacher, sequence_tokens=settings.sequence_tokens)
    peak = question.teacher_flops_per_s(gpu) * setup.num_devices
    rate = settings.teacher_tokens_per_s or peak * settings.teacher_mfu / flops
    balanced = needed_replicas(
        teacher_s=settings.tokens_per_gpu / rate,
        student_s=_student_s(question, student_rate, trainer_setup(question, "disagg", "fused")),
        num_trainers=settings.num_trainers,
    )
    memory = teacher_memory(setup)
    return TeacherPlan(
        tp=setup.tp,
        pp=setup.pp,
        num_replicas=settings.teacher_replicas or balanced,
        balanced_replicas=balanced,
        memory=memory,
        needed_bytes=question.needed(memory),
        capacity_bytes=gpu.memory_bytes,
        tokens_per_s=rate,
        flops_per_token=flops,
    )


def _stages(question: Question, student_rate: float, teacher: TeacherPlan) -> Stages:
    settings = question.settings
    return Stages(
        teacher_s=settings.tokens_per_gpu / teacher.tokens_per_s,
        link_s=_microbatch_bytes(question) / question.link.payload_bytes_per_s,
        student_s=_student_s(question, student_rate, trainer_setup(question, "disagg", "fused")),
        latency_s=question.link.latency_s,
        num_replicas=teacher.num_replicas,
        num_trainers=settings.num_trainers,
        # Where a trainer is several nodes wide, one of them receives its states.
        num_links=min(settings.nodes, settings.num_trainers),
        depth=settings.ring_depth,
        jitter_frac=settings.jitter_frac,
    )


def _layout_plan(
    question: Question, layout: Layout, loss: Loss, nodes: int, student_rate: float, teacher: TeacherPlan
) -> LayoutPlan:
    settings = question.settings
    if nodes != settings.nodes:
        question = replace(question, settings=replace(settings, nodes=nodes))
        settings, teacher = question.settings, _teacher_plan(question, student_rate)
    setup = trainer_setup(question, layout, loss)
    memory = trainer_memory(setup)
    gather_s, num_gpus = 0.0, settings.num_gpus
    if layout == "disagg":
        step_s = pace(_stages(question, student_rate, teacher)).step_s
        num_gpus += teacher.num_gpus
    else:
        # Here every GPU runs its own passes, and reaches what a teacher's GPU would.
        own, theirs = map(question.teacher_flops_per_s, (question.gpu, question.teacher_gpu))
        share = own / theirs / (teacher.tp * teacher.pp)
        pass_s = settings.tokens_per_gpu / (teacher.tokens_per_s * share)
        if setup.shards > 1:
            gather_s = exchange_s(question, teacher_gathering(setup))
        together = 1 + settings.jitter_frac * expected_largest(settings.num_trainers)
        step_s = (_student_s(question, student_rate, setup) + max(pass_s, gather_s)) * together
    return LayoutPlan(
        layout=layout,
        loss=loss,
        num_nodes=nodes,
        memory=memory,
        needed_bytes=question.needed(memory),
        capacity_bytes=question.gpu.memory_bytes,
        num_gpus=num_gpus,
        step_s=step_s,
        tokens_per_s=settings.tokens_per_gpu * settings.num_trainers / step_s,
        gather_s=gather_s,
    )
