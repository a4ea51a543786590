"""Memory of one trainer device, by moment of a step, for every layout and loss.

The moments, in the order of a step: `teacher` (colocated only: its pass), `loss` (all activations are there, and the
loss at work), `backward_start`, `backward_end` (all gradients are there), `root_reduction` (sharded only), `optimizer`.
Weights and optimizer state are there at each of them.

Letters in formulas: N parameters, d hidden, V vocabulary columns, T tokens, R rows, F ranks that share the state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from planner.activations import ELEMENT_BYTES, LayerActivations, layer_activations, saved_bytes
from planner.loss_costs import (
    LossPlan,
    LossShape,
    choose_mode,
    gradient_bytes,
    make_plan,
    statistics_bytes,
)
from planner.memory import DeviceMemory, Term, divided, moment, optimizer_bytes, slot_bytes
from planner.teacher_memory import pass_bytes
from planner.trainer_setup import (
    CAREFUL_LOGIT_BYTES,
    REDUCED_BYTES,
    TEXTBOOK_LOGIT_BYTES,
    Layout,
    Loss,
    TrainerSetup,
)

__all__ = [
    "CAREFUL_LOGIT_BYTES",
    "TEXTBOOK_LOGIT_BYTES",
    "Layout",
    "Loss",
    "TrainerSetup",
    "loss_plan",
    "loss_shape",
    "trainer_memory",
]


def trainer_memory(setup: TrainerSetup) -> DeviceMemory:
    """Everything that the trainer's device holds, at each moment of a step."""
    base = [*_state_terms(setup), *_ring_terms(setup)]
    gradients = _gradients(setup)
    earlier = [gradients] if setup.grad_accum > 1 else []
    root_weights, root_gradients = _root_terms(setup)
    moments = []
    if setup.layout == "colocated":
        base += [_teacher_weights(setup)]
        moments.append(moment("teacher", [*base, *earlier, *_teacher_pass_terms(setup)]))
    held = _held_terms(setup)
    layer = _widest_layer(setup)
    # While one layer is at work the next is gathered, which may be one of another kind: the largest counts.
    gathered = 0 if setup.shards == 1 else divided(setup.student.largest_layer.params.count, by=setup.tp)
    casts = setup.arithmetic == "autocast"
    if casts and setup.checkpointing:
        moments.append(
            moment(
                "forward_end",
                [
                    *base,
                    *earlier,
                    *held,
                    Term("weight_casts", 2 * setup.student.body.count, f"2 x {setup.student.body.count:,}"),
                ],
            )
        )
    loss_terms = _fused_terms(setup) if setup.loss == "fused" else _full_terms(setup)
    moments.append(moment("loss", [*base, *earlier, *held, *root_weights, *loss_terms]))
    backward = _backward_terms(setup, layer, gathered)
    head_gradient = Term(
        "head_gradient",
        setup.columns * setup.student.hidden_size * setup.element_bytes,
        f"V d {setup.element_bytes} = {setup.columns:,} x {setup.student.hidden_size:,} x {setup.element_bytes}",
    )
    start = [] if setup.shards > 1 else [head_gradient]
    moments.append(
        moment("backward_start", [*base, *earlier, *held, *root_weights, *root_gradients, *start, *backward])
    )
    moments.append(
        moment("backward_end", [*base, gradients, *root_weights, *root_gradients, *_tied_terms(setup), *backward])
    )
    if setup.shards > 1:
        # Last of all the root group's gradients are summed over the ranks, in float32 and in one piece.
        count = sum(term.num_bytes for term in root_gradients) // (2 if setup.arithmetic != "fp32" else 4)
        reduced = Term(
            "root_reduction", REDUCED_BYTES * count, f"{REDUCED_BYTES} x {count:,}: in float32, to be summed"
        )
        moments.append(moment("root_reduction", [*base, gradients, *root_weights, *root_gradients, reduced]))
    moments.append(moment("optimizer", [*base, gradients, _optimizer_temporaries(setup)]))
    return DeviceMemory(tuple(moments))


# ---- what is there all the time ------------------------------------------------------------------------------------


def _share(setup: TrainerSetup, num_bytes: int, kept_bytes: int) -> int:
    """This rank's part of something that all parameters have, of which `kept_bytes` are cut over a vocabulary group."""
    cut = divided(num_bytes - kept_bytes, by=setup.shards * setup.tp)
    return cut + divided(kept_bytes, by=setup.vocab_shards * setup.tp)


def _of_state(setup: TrainerSetup, element: int) -> tuple[int, str]:
    """Bytes and formula of `element` bytes for every parameter."""
    count, kept, ranks = setup.student.num_params, setup.kept.count, setup.shards * setup.tp
    over = f" / {ranks}" if ranks > 1 else ""
    says = f"{element} N{over} = {element} x {count - kept:,}{over}"
    if kept:
        says += f" + {element} x {kept:,} / {setup.vocab_shards * setup.tp}"
    return _share(setup, element * count, element * kept), says


def _state_terms(setup: TrainerSetup) -> list[Term]:
    element = setup.element_bytes
    state, kept = (
        optimizer_bytes(params, element_bytes=element, is_8bit=setup.is_8bit)
        for params in (setup.student.params, setup.kept)
    )
    says = "2 x 8 bit and scales" if setup.is_8bit else f"2 x {element} bytes and a count for each tensor"
    return [
        Term("weights", *_of_state(setup, element)),
        Term("optimizer_state", _share(setup, state, kept), f"{says}, shared as the weights are"),
    ]


def _gradients(setup: TrainerSetup) -> Term:
    return Term("gradients", *_of_state(setup, setup.element_bytes))


def _ring_terms(setup: TrainerSetup) -> list[Term]:
    teacher, wire = setup.teacher, setup.wire_bytes
    slot, num_slots = slot_bytes(setup.rows, teacher.hidden_size, wire), setup.ring_depth + setup.ring_spares
    columns = divided(teacher.vocab_size, by=setup.vocab_shards)
    head = Term(
        "teacher_head",
        columns * teacher.hidden_size * setup.teacher_bytes,
        f"V d_t {setup.teacher_bytes} = {columns:,} x {teacher.hidden_size:,} x {setup.teacher_bytes}",
    )
    if setup.slots_on_device:
        says = f"(depth + spares) R d_t b = {num_slots} x {setup.rows:,} x {teacher.hidden_size:,} x {wire}, in pages"
        return [Term("ring_slots", num_slots * slot, says), head]
    return [Term("states", slot, f"R d_t b = {setup.rows:,} x {teacher.hidden_size:,} x {wire}, a copy"), head]


def _root_terms(setup: TrainerSetup) -> tuple[list[Term], list[Term]]:
    """Sharded: embedding, head and final norm stay gathered from the forward to the end of the backward pass."""
    if setup.shards == 1:
        return [], []
    student = setup.student
    ends = student.embedding.count + student.head.count - setup.kept.count
    count = divided(ends, by=setup.tp) + student.final_norm.count
    element = 2 if setup.arithmetic != "fp32" else 4
    says = f"{element} x {count:,} (embedding, head, final norm: what of them is gathered)"
    return (
        [Term("root_weights", element * count, says)],
        [Term("root_gradients", element * count, f"{element} x {count:,}")],
    )


# ---- the forward pass ----------------------------------------------------------------------------------------------


def _delta(setup: TrainerSetup) -> Literal["fused", "torch"]:
    return "fused" if setup.has_delta_kernel else "torch"


def _layer_activations(setup: TrainerSetup, index: int) -> LayerActivations:
    return layer_activations(
        setup.student.layers[index],
        setup.student,
        setup.arithmetic,
        sequence_tokens=setup.sequence_tokens,
        delta_kernel=_delta(setup),
        tp=setup.tp,
    )


def _widest_layer(setup: TrainerSetup) -> LayerActivations:
    """Of the layer whose backward pass takes most, besides what the whole forward pass holds."""
    layers = [_layer_activations(setup, index) for index in range(len(setup.student.layers))]
    return max(layers, key=lambda layer: _backward_bytes(setup, layer))


def _backward_bytes(setup: TrainerSetup, layer: LayerActivations) -> int:
    """A token of one layer at work: its saved tensors where they were dropped and are made again, and gradients."""
    return layer.working + (layer.saved if setup.checkpointing else 0)


def _held_terms(setup: TrainerSetup) -> list[Term]:
    """What the forward pass leaves, and the final states."""
    student, element = setup.student, ELEMENT_BYTES[setup.arithmetic]
    hidden, num_layers = student.hidden_size, student.num_layers
    # The norm's output, and where the stream is wider the cast that the loss reads.
    final_bytes = element.stream + (2 if setup.arithmetic == "autocast" else 0)
    final = Term(
        "final_states",
        setup.tokens * hidden * final_bytes,
        f"{final_bytes} T d = {final_bytes} x {setup.tokens:,} x {hidden:,}",
    )
    if setup.checkpointing:
        each = hidden * element.stream
        says = f"{element.stream} T d L = {element.stream} x {setup.tokens:,} x {hidden:,} x {num_layers}"
        return [Term("activation_checkpoints", setup.tokens * each * num_layers, says), final]
    per_token = saved_bytes(
        student,
        setup.arithmetic,
        sequence_tokens=setup.sequence_tokens,
        delta_kernel=_delta(setup),
        tp=setup.tp,
    )
    terms = [
        Term(
            "activations",
            setup.tokens * per_token,
            f"T x {per_token:,} a token (counted by layer), T = {setup.tokens:,}",
        ),
        final,
    ]
    if setup.arithmetic == "autocast":
        count = student.body.count
        terms.append(Term("weight_casts", 2 * count, f"2 x {count:,}: bf16 copies of the layers' weights"))
    return terms


# ---- the loss ------------------------------------------------------------------------------------------------------


def loss_shape(setup: TrainerSetup) -> LossShape:
    """The loss's call in its own numbers."""
    is_16bit = setup.arithmetic != "fp32"
    on_slow_cpu = setup.device == "cpu" and is_16bit and not setup.matrix_units
    on_fast_cpu = setup.device == "cpu" and is_16bit and setup.matrix_units
    return LossShape(
        # A group's ranks handle each other's rows, each for its own columns.
        num_rows=setup.rows * setup.vocab_shards,
        num_columns=setup.columns,
        student_hidden=setup.student.hidden_size,
        teacher_hidden=setup.teacher.hidden_size,
        student_logit_products=2 if on_fast_cpu else 1,
        teacher_logit_products=2 if on_fast_cpu else 1,
        state_bytes=2 if is_16bit and not on_slow_cpu else 4,
        hidden_grad_bytes=2 if is_16bit else 4,
        casts_states=on_slow_cpu,
        num_block_buffers=0 if setup.device == "cuda" else 4,
    )


def loss_plan(setup: TrainerSetup) -> LossPlan:
    """What the fused loss would choose here. Raises ValueError: a workspace too small for any tile."""
    shape = loss_shape(setup)
    mode = choose_mode(shape, device=setup.device, free_bytes=setup.free_bytes, workspace_bytes=setup.workspace_bytes)
    return make_plan(shape, mode, device=setup.device, workspace_bytes=setup.workspace_bytes)


def _fused_terms(setup: TrainerSetup) -> list[Term]:
    shape, plan = loss_shape(setup), loss_plan(setup)
    hidden, columns = setup.student.hidden_size, setup.columns
    hidden_only = gradient_bytes(replace(shape, grad_weight=False, num_rows=setup.rows), plan.mode)
    weight_only = gradient_bytes(replace(shape, grad_hidden=False), plan.mode)
    # A 16-bit weight is handed its gradient in its own dtype: for a moment both are there.
    is_gathered = setup.shards > 1 and setup.arithmetic != "fp32" and not setup.kept.count
    cast = columns * hidden * 2 if is_gathered or setup.element_bytes == 2 else 0
    says = f"4 V d = 4 x {columns:,} x {hidden:,}" + (" and a 16-bit copy" if cast else "")
    return [
        Term(
            "loss_workspace",
            plan.workspace_bytes,
            f"{plan.mode}: {plan.window_rows} rows x {plan.tile_columns:,} columns at a time",
        ),
        Term("loss_statistics", statistics_bytes(shape), f"256 R = 256 x {shape.num_rows:,}"),
        Term("hidden_gradient", hidden_only, f"R d, R = {setup.rows:,}, d = {hidden:,}"),
        Term("head_gradient", weight_only + cast, says),
    ]


def _full_terms(setup: TrainerSetup) -> list[Term]:
    student = setup.student
    terms = [
        Term(
            "full_logits",
            setup.full_logit_bytes * setup.rows * student.vocab_size,
            f"{setup.full_logit_bytes} R V = {setup.full_logit_bytes} x {setup.rows:,} x {student.vocab_size:,}",
        )
    ]
    if setup.arithmetic == "autocast":
        terms.append(Term("head_cast", 2 * student.head_width, f"2 V d = 2 x {student.head_width:,}"))
    return terms


# ---- the backward pass and the update ------------------------------------------------------------------------------


def _backward_terms(setup: TrainerSetup, layer: LayerActivations, gathered: int) -> list[Term]:
    """One layer at work: its saved tensors where they were dropped, gradients on their way, gathered weights."""
    per_token = _backward_bytes(setup, layer)
    terms = [
        Term(
            "layer_working_set",
            setup.tokens * per_token,
            f"T x {per_token:,} a token: one layer's backward pass, T = {setup.tokens:,}",
        )
    ]
    if gathered:
        element = 2 if setup.arithmetic != "fp32" else 4
        each = 3 * element + REDUCED_BYTES
        says = f"{each} x {gathered:,}: two layers' weights, one's gradients, and these in float32 on their way"
        terms.append(Term("gather_buffers", each * gathered, says))
    if setup.arithmetic == "autocast" and setup.checkpointing:
        count = setup.student.largest_layer.params.count
        terms.append(Term("weight_casts", 2 * count, f"2 x {count:,}: one layer's weights in bf16"))
    return terms


def _tied_terms(setup: TrainerSetup) -> list[Term]:
    """The embedding's gradient comes last and is added to the head's, which is the same parameter's."""
    if not setup.student.is_tied or setup.shards > 1:
        return []
    count = setup.student.embedding.count
    return [Term("embedding_gradient", setup.element_bytes * count, f"{setup.element_bytes} V d, before it is added")]


def _optimizer_temporaries(setup: TrainerSetup) -> Term:
    if setup.is_8bit:
        return Term("optimizer_temporaries", 0, "")
    element, params = setup.element_bytes, setup.student.params
    if setup.device == "cuda":
        num_bytes, says = _of_state(setup, element)
        return Term("optimizer_temporaries", num_bytes, f"{says}: square roots of all second moments at once")
    says = f"2 x {element} x {params.largest:,}: of the largest tensor"
    return Term("optimizer_temporaries", 2 * element * params.largest, says)


# ---- the colocated teacher -----------------------------------------------------------------------------------------


def _teacher_weights(setup: TrainerSetup) -> Term:
    count, element = setup.teacher.num_params, setup.teacher_bytes
    over = f" / {setup.shards}" if setup.shards > 1 else ""
    return Term(
        "teacher_weights",
        divided(element * count, by=setup.shards),
        f"{element} N_t{over} = {element} x {count:,}{over}",
    )


def _teacher_pass_terms(setup: TrainerSetup) -> list[Term]:
    teacher = setup.teacher
    tokens = setup.pass_tokens or setup.tokens
    activations = pass_bytes(teacher, element_bytes=setup.teacher_bytes, sequence_tokens=setup.sequence_tokens)
    terms = [Term("teacher_activations", tokens * activations, f"T x {activations:,} a token, T = {tokens:,}")]
    if setup.shards > 1:
        count = teacher.largest_layer.params.count
        terms.append(
            Term(
                "teacher_gather",
                2 * setup.teacher_bytes * count,
                f"2 x {setup.teacher_bytes} x {count:,}: two layers' weights gathered",
            )
        )
    return terms
