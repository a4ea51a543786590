"""The student and its loss: one module, the same numbers whatever the batching, packing and loss are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ring.core.errors import ConfigError
from student.data import (
    MicroBatch,
    MicroBatchPlan,
    PlannedMicroBatch,
    TokenDataset,
    build_microbatch,
    sequential_microbatches,
)
from student.loss import FullLogitsLoss, Head, KDLoss, KDOutput
from student.model import DistilledStudent, evaluate
from tests.student.conftest import student_in_memory, teacher_head, teacher_states
from tests.tiny_models import FAMILIES, TOKENIZER_VOCAB

MakeDataset = Callable[..., TokenDataset]
fp64: dict[str, Any] = {"dtype": torch.float64}


def distilled(
    family: str = "qwen3", *, full: bool = False, head: Head | None = None, model: Any = None, **options: Any
) -> DistilledStudent:
    """A float64 student with half KD and half CE, unless said otherwise; the same weights every time."""
    loaded = student_in_memory(family, **fp64, **(model or {}))
    loss = (FullLogitsLoss if full else KDLoss)(kd_weight=options.pop("kd_weight", 0.5), ce_weight=0.5)
    options = {"precision": "fp64", "teacher_head": head or teacher_head(**fp64)} | options
    return DistilledStudent(loaded.model, loaded.head_spec, loss=loss, **options)


def run(module: DistilledStudent, *batches: MicroBatch, num_rows: int | None = None) -> tuple[list[KDOutput], Any]:
    """Outputs of the batches, and all gradients after their backward passes."""
    module.zero_grad()
    outputs = []
    for batch in batches:
        states = teacher_states(batch, dtype=module.model.dtype)
        outputs.append(module(**batch.inputs("cpu"), teacher_hidden=states, num_rows=num_rows))
        outputs[-1].loss.backward()
    return outputs, {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(left: Any, right: Any, *, rtol: float = 1e-9) -> None:
    """Relative to the largest entry of each gradient: sums of other orders differ in what nearly cancels."""
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        atol = rtol * float(gradient.abs().max())
        torch.testing.assert_close(gradient, right[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def batch_of(dataset: TokenDataset, *sequences: tuple[int, ...]) -> MicroBatch:
    return build_microbatch(dataset, PlannedMicroBatch(seq=0, sequences=sequences))


@pytest.fixture
def dataset(ids_dataset: MakeDataset) -> TokenDataset:
    """Eight documents of very different lengths, one of them with a prompt that does not count."""
    rng = np.random.default_rng(11)
    documents: list[dict[str, Any]] = [
        {"input_ids": rng.integers(1, TOKENIZER_VOCAB, n).tolist()} for n in (2, 2, 2, 2, 16, 16, 16, 16)
    ]
    documents[6]["loss_mask"] = [0] * 9 + [1] * 7
    return ids_dataset(*documents)


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_only_loss_is_the_models_own_cross_entropy(family: str, dataset: TokenDataset) -> None:
    module = distilled(family)
    module.eval()
    batch = batch_of(dataset, (0,), (4,), (6,))
    with torch.no_grad():
        logits = module.model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
        own = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=-100)
        ours = module(**batch.inputs("cpu"), labels_only=True).ce
    torch.testing.assert_close(ours, own, rtol=1e-10, atol=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5_moe"])
def test_fused_and_full_loss_give_the_same_step(family: str, dataset: TokenDataset) -> None:
    batch = batch_of(dataset, (0,), (4,), (6,))
    (fused,), fused_gradients = run(distilled(family), batch)
    (full,), full_gradients = run(distilled(family, full=True), batch)
    for ours, theirs in zip(fused[:3], full[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    assert fused.rows == full.rows == 1 + 15 + 7
    assert_same_gradients(fused_gradients, full_gradients)


def test_gradient_of_a_step_does_not_depend_on_how_it_is_cut_into_microbatches(dataset: TokenDataset) -> None:
    module = distilled()
    num_rows = int(dataset.row_counts.sum())
    found = []
    for grad_accum in (1, 2, 4, 8):
        plan = MicroBatchPlan(
            row_counts=dataset.row_counts,
            lengths=dataset.lengths,
            batch_size=8 // grad_accum,
            grad_accum=grad_accum,
            epochs=1,
        )
        (step,) = plan.steps()
        assert step.num_rows == num_rows
        batches = [build_microbatch(dataset, planned) for planned in step.microbatches]
        outputs, gradients = run(module, *batches, num_rows=step.num_rows)
        found.append((sum(float(output.loss.detach()) for output in outputs), gradients))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        assert_same_gradients(gradients, found[0][1])


@pytest.mark.case(43)
def test_ten_samples_in_batches_of_four_divide_the_third_by_its_own_rows(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset(*([7 * i + 1, 5 * i + 2, 3 * i + 3][: 2 + i % 2] for i in range(10)))
    module = distilled()
    plan = MicroBatchPlan(row_counts=dataset.row_counts, lengths=dataset.lengths, batch_size=4, epochs=1)
    steps = list(plan.steps())
    assert len(steps) == 3
    for step in steps:
        (planned,) = step.microbatches
        batch = build_microbatch(dataset, planned)
        (output,), _ = run(module, batch, num_rows=step.num_rows)
        (mean,), _ = run(module, batch)
        assert float(output.loss.detach()) == float(mean.loss.detach())
        assert output.rows == step.num_rows == sum(dataset.row_counts[list(planned.sample_ids)])


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3"])
@pytest.mark.case(48)
def test_packed_documents_give_the_loss_and_gradients_of_separate_ones(family: str, ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset([11, 12, 13], [21, 22], [31, 32, 33, 34, 35, 36])
    module = distilled(family, packed=True)
    module.eval()  # GPT-2 has dropout by default, which draws anew for another layout
    packed, packed_gradients = run(module, batch_of(dataset, (0, 1), (2,)))
    alone, alone_gradients = run(module, batch_of(dataset, (0,), (1,), (2,)))
    assert packed[0].rows == alone[0].rows == 3 + 5
    torch.testing.assert_close(packed[0].loss, alone[0].loss, rtol=1e-10, atol=0)
    # Gemma's norms compute in float32 whatever the weights are.
    assert_same_gradients(packed_gradients, alone_gradients, rtol=1e-5 if family == "gemma3" else 1e-9)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_that_mixes_packed_documents_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match=r"--packing: Qwen3_5.*ForCausalLM mixes the documents"):
        distilled(family, packed=True)


def test_what_lies_in_masked_rows_changes_nothing(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1]}, [40, 41, 42, 43, 44, 45, 46])
    module = distilled()
    batch = batch_of(dataset, (0,), (1,))
    (before,), _ = run(module, batch)
    poisoned = batch.labels.clone()
    outside = torch.ones(len(poisoned), dtype=torch.bool)
    outside[batch.row_index] = False
    poisoned[outside] = 3
    inputs = batch.inputs("cpu") | {"labels": poisoned}
    after = module(**inputs, teacher_hidden=teacher_states(batch, **fp64))
    assert float(after.loss.detach()) == float(before.loss.detach())


def test_gradient_checkpointing_changes_no_number(dataset: TokenDataset) -> None:
    batch = batch_of(dataset, (4,), (6,))
    (plain,), plain_gradients = run(distilled(), batch)
    module = distilled(gradient_checkpointing=True)
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in module.modules())
    (recomputed,), gradients = run(module, batch)
    assert float(recomputed.loss.detach()) == float(plain.loss.detach())
    assert_same_gradients(gradients, plain_gradients)


def test_bf16_is_autocast_over_float32_weights(dataset: TokenDataset) -> None:
    batch = batch_of(dataset, (4,), (5,), (6,))
    loaded = student_in_memory()
    head = teacher_head(dtype=torch.bfloat16)
    exact, _ = run(distilled(head=teacher_head(**fp64)), batch)
    module = DistilledStudent(loaded.model, loaded.head_spec, loss=KDLoss(), teacher_head=head, precision="bf16")
    output = module(**batch.inputs("cpu"), teacher_hidden=teacher_states(batch, dtype=torch.bfloat16))
    output.loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters() if p.grad is not None)
    assert float(output.loss.detach()) == pytest.approx(float(exact[0].loss.detach()), rel=2e-2)
    assert float(output.loss.detach()) != float(exact[0].loss.detach())


# --- without a teacher, without rows -------------------------------------------------------------


def test_without_a_kd_weight_there_is_no_teacher(dataset: TokenDataset) -> None:
    module = distilled(kd_weight=0.0, teacher_head=None)
    batch = batch_of(dataset, (4,), (6,))
    output = module(**batch.inputs("cpu"))
    output.loss.backward()
    assert float(output.kd) == 0
    torch.testing.assert_close(output.loss.detach(), 0.5 * output.ce)
    reference = module(**batch.inputs("cpu"), labels_only=True)
    torch.testing.assert_close(output.ce, reference.ce)


@pytest.mark.filterwarnings("ignore:distillation loss. no row:RuntimeWarning")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe"])
@pytest.mark.case(41)
def test_a_rank_without_rows_still_gives_every_parameter_a_zero_gradient(family: str, ids_dataset: MakeDataset) -> None:
    module = distilled(family)
    batch = build_microbatch(ids_dataset([1, 2]), PlannedMicroBatch(seq=None, sequences=()))
    output = module(**batch.inputs("cpu"), teacher_hidden=torch.empty(0, 48, **fp64), num_rows=17)
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    for name, parameter in module.named_parameters():
        # Experts that the router did not choose get none in any step: that is theirs, not the empty batch's.
        if "experts" not in name:
            assert parameter.grad is not None, name
        if parameter.grad is not None:
            assert not parameter.grad.any(), name


# --- the teacher's head --------------------------------------------------------------------------


def test_teacher_gets_no_gradient_and_no_place_in_the_state() -> None:
    head = teacher_head(**fp64)
    module = distilled(head=head)
    assert not any("teacher" in name for name in module.state_dict())
    assert not any("teacher" in name for name, _ in module.named_parameters())
    # The very tensor, not a copy: it is the largest one that a trainer holds beside its own.
    assert module.teacher_weight is not None
    assert module.teacher_weight.data_ptr() == head.weight.data_ptr()


def test_padded_vocabularies_of_different_sizes_fit_and_real_ones_must_agree() -> None:
    padded = teacher_head(**fp64, vocab_size=352)
    assert distilled(head=padded, model={"vocab_size": 384}).head_spec.real_vocab == TOKENIZER_VOCAB
    unlike = Head(weight=torch.randn(352, 48, **fp64))
    with pytest.raises(ConfigError, match=r"teacher and student don't fit.*320.*352"):
        distilled(head=unlike)


def test_impossible_combinations_are_refused() -> None:
    loaded = student_in_memory()
    with pytest.raises(ConfigError, match="needs the teacher's head"):
        DistilledStudent(loaded.model, loaded.head_spec, loss=KDLoss(), precision="fp32")
    with pytest.raises(ConfigError, match=r"float32; allowed with precision fp64: torch.float64"):
        DistilledStudent(loaded.model, loaded.head_spec, loss=KDLoss(kd_weight=0), precision="fp64")


# --- evaluation ----------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_rows_whatever_the_batches(dataset: TokenDataset) -> None:
    module = distilled(model={"attention_dropout": 0.5})
    module.train()
    rng_before = torch.get_rng_state()
    results = [evaluate(module, sequential_microbatches(dataset, batch_size=n), device="cpu") for n in (1, 3, 8)]
    assert module.training
    assert torch.equal(torch.get_rng_state(), rng_before)
    assert {result.num_rows for result in results} == {int(dataset.row_counts.sum())}
    for result in results[1:]:
        assert result.nats_per_row == pytest.approx(results[0].nats_per_row, rel=1e-12)
    whole = batch_of(dataset, *((i,) for i in range(dataset.num_samples)))
    module.eval()
    with torch.no_grad():
        logits = module.model(input_ids=whole.input_ids, use_cache=False).logits.flatten(0, 1)
        own = torch.nn.functional.cross_entropy(logits, whole.labels, ignore_index=-100)
    assert results[0].nats_per_row == pytest.approx(float(own), rel=1e-10)


@pytest.mark.parametrize("loss_type", [KDLoss, FullLogitsLoss])
def test_evaluation_takes_no_more_memory_than_the_runs_loss_may(
    dataset: TokenDataset, loss_type: type[KDLoss | FullLogitsLoss]
) -> None:
    """Left to itself it would take what is free, and its windows, so its sums, would follow from that."""
    loaded = student_in_memory()
    inputs = batch_of(dataset, (4,), (5,)).inputs("cpu")

    def evaluated(workspace_bytes: int) -> KDOutput:
        loss = loss_type(kd_weight=0.5, ce_weight=0.1, workspace_bytes=workspace_bytes)
        module = DistilledStudent(loaded.model, loaded.head_spec, loss=loss, teacher_head=teacher_head()).eval()
        with torch.no_grad():
            output: KDOutput = module(**inputs, labels_only=True)
        return output

    assert torch.equal(evaluated(1 << 20).loss, evaluated(1 << 20).ce), "the plain cross entropy, whatever the weights"
    with pytest.raises(ValueError, match="workspace_bytes: got 64; allowed: "):
        evaluated(64)


def test_evaluation_leaves_no_gradient_behind(dataset: TokenDataset) -> None:
    module = distilled()
    evaluate(module, sequential_microbatches(dataset, batch_size=4), device="cpu")
    assert all(parameter.grad is None for parameter in module.parameters())
