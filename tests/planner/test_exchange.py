"""Bytes between ranks: the closed forms against real collectives, and where each group lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from planner.exchange import Exchange, exchanges_of
from planner.families import shape_of
from planner.plan import plan_of, question_of, trainer_setup
from planner.settings import PlanSettings
from planner.trainer_memory import TrainerSetup, loss_plan
from tests.planner.moved_bytes import NUM_MICROBATCHES, SEQUENCES, TEACHER_WIDTH, TOKENS, WORKSPACES, WORLD, Way, ways
from tests.ranks.world import run_ranks
from tests.system.processes import Command
from tests.tiny_models import tiny_model

#: Counts of rows, and which parameters have a gradient: a few numbers for each exchange, whatever the shapes.
TALK_BYTES = 256


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, float]]:
    cwd = tmp_path_factory.mktemp("ranks")
    ranks: list[Command] = run_ranks("tests.planner.moved_bytes", cwd / "moved.json", size=WORLD, cwd=cwd)
    try:
        for rank in ranks:
            rank.succeed()
        yield json.loads((cwd / "moved.json").read_text())
    finally:
        for rank in ranks:
            rank.end()


def setup_of(way: Way) -> TrainerSetup:
    student, teacher = (
        shape_of(tiny_model("qwen3", tie_word_embeddings=way.tied, **sizes).config.to_dict(), name="tiny")
        for sizes in ({"num_hidden_layers": 3}, {"hidden_size": TEACHER_WIDTH})
    )
    arithmetic: Any = "fp32" if way.precision == "fp32" else "bf16" if way.fsdp else "autocast"
    return TrainerSetup(
        student=student,
        teacher=teacher,
        tokens=SEQUENCES * TOKENS,
        rows=SEQUENCES * TOKENS,
        sequence_tokens=TOKENS,
        arithmetic=arithmetic,
        shards=WORLD if way.fsdp else 1,
        vocab_shards=way.vocab,
        checkpointing=way.checkpointing,
        grad_accum=NUM_MICROBATCHES,
        device="cpu",
        wire_bytes=2 if way.precision == "bf16" else 4,
        workspace_bytes=WORKSPACES[way.mode],
    )


@pytest.mark.parametrize("way", list(ways()), ids=lambda way: way.name)
def test_bytes_that_ranks_receive_are_those_of_real_collectives(way: Way, moved: dict[str, float]) -> None:
    setup = setup_of(way)
    assert loss_plan(setup).mode == way.mode
    exchanges = exchanges_of(setup, num_trainers=WORLD)
    predicted = NUM_MICROBATCHES * sum(exchange.num_bytes for exchange in exchanges)
    assert 0 <= moved[way.name] - predicted <= TALK_BYTES, exchanges


# ---- in a plan ------------------------------------------------------------------------------------------------------

#: Of Qwen3.5-9B: all parameters, embedding and head each, the final norm.
COUNT, END, NORM = 8_953_803_264, 248_320 * 4096, 4096
#: Preset L40S to its peers, and IB-400.
PEER_BYTES_PER_S, FABRIC_BYTES_PER_S = 32e9, 0.95 * 50e9


def student_s(**changes: Any) -> float:
    """Of a microbatch on GPUs that compute in no time."""
    settings = PlanSettings(
        teacher="Qwen3.5-35B-A3B", student="Qwen3.5-9B", gpu="L40S", gpu_tflops=1e6, gpu_memory_gb=400.0, **changes
    )
    return plan_of(question_of(settings)).stages.student_s


def test_sharded_weights_are_gathered_as_bf16_and_gradients_summed_as_float32() -> None:
    # Layers twice, embedding, head and norm once.
    gathered = 2 * (2 * COUNT - (2 * END + NORM))
    assert student_s() == pytest.approx((gathered + 4 * COUNT) * 7 / 8 / PEER_BYTES_PER_S)
    assert student_s(precision="fp32") == pytest.approx((2 * gathered + 4 * COUNT) * 7 / 8 / PEER_BYTES_PER_S)
    across = (gathered + 4 * COUNT) * 15 / 16 / FABRIC_BYTES_PER_S
    assert student_s(nodes=2) == pytest.approx(across)


def test_replicas_of_the_state_sum_their_gradients_once_a_step() -> None:
    assert student_s(fsdp_ranks=1) == pytest.approx(2 * 4 * COUNT * 7 / 8 / PEER_BYTES_PER_S)
    assert student_s(fsdp_ranks=1, grad_accum=4) == pytest.approx(2 * COUNT * 7 / 8 / PEER_BYTES_PER_S)
    assert student_s(fsdp_ranks=1, nodes=2) == pytest.approx(2 * 4 * COUNT * 15 / 16 / FABRIC_BYTES_PER_S)
    assert student_s(fsdp_ranks=1, gpus=1) < 1e-2


def test_groups_within_a_node_move_at_its_rate_and_only_their_sums_go_between_nodes() -> None:
    gathered = 2 * (2 * COUNT - (2 * END + NORM))
    within = (gathered + 4 * COUNT) * 3 / 4 / PEER_BYTES_PER_S
    between = 2 * 4 * (COUNT / 4) * 3 / 4 / FABRIC_BYTES_PER_S
    assert student_s(fsdp_ranks=4, nodes=2) == pytest.approx(within + between)


def test_a_vocabulary_group_receives_the_rows_of_all_its_other_ranks() -> None:
    """8 ranks of 8192 rows: states, labels and statistics of the 7 others, and their parts of dX. The head itself
    is not gathered, nor its gradient scattered: it lies in eighths, which nobody else has."""
    states, grad = 7 * 8192 * (4096 + 2048) * 2, 7 * 8192 * 4096 * 4
    assert states == 704_643_072
    assert grad == 939_524_096
    # Logits of a window of 512 rows do not fit: states and labels come twice.
    rows = 2 * (states + 7 * 8192 * 8) + 7 * (8 * 8192) * 7 * 4 + grad
    rest = COUNT - END
    sharded = (2 * (2 * rest - (END + NORM)) + 4 * rest) * 7 / 8
    for nodes in (1, 2):
        found = exchanges_in_plan(vocab_parallel=8, nodes=nodes, workspace_bytes=1 << 26)
        assert found["rows of the vocabulary group"] == (rows, False)
    assert student_s(vocab_parallel=8, workspace_bytes=1 << 26) == pytest.approx((rows + sharded) / PEER_BYTES_PER_S)


def test_groups_of_a_vocabulary_sum_the_gradients_of_their_heads() -> None:
    found = exchanges_in_plan(vocab_parallel=4, nodes=2)
    assert found["head's gradients, summed over vocabulary groups"] == (2 * 4 * (END // 4) * 3 // 4, True)


def exchanges_in_plan(**changes: Any) -> dict[str, tuple[int, bool]]:
    """Bytes of each, and whether they cross nodes."""
    settings = PlanSettings(teacher="Qwen3.5-35B-A3B", student="Qwen3.5-9B", **changes)
    setup = trainer_setup(question_of(settings), "disagg", "fused")
    return {
        each.name: (each.num_bytes, each.crosses_nodes(gpus=settings.gpus, nodes=settings.nodes))
        for each in exchanges_of(setup, num_trainers=settings.num_trainers)
    }


@pytest.mark.parametrize(
    ("span_gpus", "crosses"), [(1, False), (4, False), (8, False), (6, True), (3, True), (16, True)]
)
def test_a_group_crosses_nodes_where_any_of_its_kind_does(span_gpus: int, crosses: bool) -> None:
    exchange = Exchange(name="", num_bytes=1, span_gpus=span_gpus, formula="")
    assert exchange.crosses_nodes(gpus=8, nodes=2) is crosses
    assert not exchange.crosses_nodes(gpus=8, nodes=1)
