"""The loss on a GPU: its kernels against the float64 oracle, then time and memory against Liger and the plain loss.

What `bench/device_check.sh` runs. Everything is a line of its own as soon as it is known, so that a machine that goes
away leaves what was measured."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from student.loss import FullLogitsLoss, Head, KDLoss, KDOutput, LossOptions, reference_loss
from student.loss.divergences import DIVERGENCES
from student.loss.plan import has_kernels

STUDENT_HIDDEN, TEACHER_HIDDEN = 1024, 2048
ROUNDS = 5
#: Largest relative error of dX and dW from bf16 inputs whose logits are float32-grade (2e-3 to 3e-3 on a CPU).
TOLERANCE = 8e-3


@dataclass(frozen=True)
class Problem:
    student_states: Tensor
    student_weight: Tensor
    teacher_states: Tensor
    teacher_weight: Tensor
    labels: Tensor

    @classmethod
    def random(cls, rows: int, columns: int, widths: tuple[int, int], device: torch.device) -> Problem:
        generator = torch.Generator(device).manual_seed(0)

        def normal(num: int, width: int, scale: float) -> Tensor:
            drawn = torch.empty(num, width, dtype=torch.bfloat16, device=device)
            return drawn.normal_(0.0, scale, generator=generator)

        student, teacher = widths
        labels_N = torch.randint(columns, (rows,), generator=generator, device=device)
        return cls(
            normal(rows, student, 1.0).requires_grad_(),
            normal(columns, student, 2.0 * student**-0.5).requires_grad_(),
            normal(rows, teacher, 1.0),
            normal(columns, teacher, 2.0 * teacher**-0.5),
            labels_N,
        )

    def gradients(self, loss: Callable[..., KDOutput], **keywords: object) -> list[Tensor]:
        self.student_states.grad = self.student_weight.grad = None
        heads = Head(weight=self.student_weight), Head(weight=self.teacher_weight)
        out = loss(self.student_states, heads[0], self.teacher_states, heads[1], self.labels, all_rows=True, **keywords)
        out.loss.backward()  # type: ignore[no-untyped-call]
        grads = [leaf.grad for leaf in (self.student_states, self.student_weight)]
        return [out.loss.detach(), *(grad for grad in grads if grad is not None)]


def main(argv: Sequence[str]) -> int:
    rows, columns = (int(value) for value in (*argv, *("2048", "151936")[len(argv) :]))
    if not torch.cuda.is_available():
        print("device_check: no CUDA device; allowed: one", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, our kernels: {has_kernels(device)}", flush=True)
    wrong = [name for name in DIVERGENCES if not _is_right(name, device)]
    _compare_times(rows, columns, device)
    if wrong:
        print(f"device_check: beyond the tolerance: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def _is_right(divergence: str, device: torch.device) -> bool:
    """Both modes, two temperatures, rows and columns that no block divides."""
    problem = Problem.random(700, 10_007, (96, 160), device)
    worst = 0.0
    for temperature in (1.0, 2.0):
        for workspace_bytes in (1 << 40, 16 << 20):
            options = LossOptions(
                divergence=divergence, temperature=temperature, workspace_bytes=workspace_bytes, ce_weight=0.1
            )
            exact = problem.gradients(lambda *a, **k: reference_loss(*a, options=options, **k))  # noqa: B023
            found = problem.gradients(KDLoss.from_options(options))
            pairs = zip(found, exact, strict=True)
            worst = max(worst, *(_relative_error(ours, theirs) for ours, theirs in pairs))
    verdict = "right" if worst <= TOLERANCE else "WRONG"
    print(f"{divergence:<16} largest relative error {worst:.2e}: {verdict} (allowed {TOLERANCE:g})", flush=True)
    return worst <= TOLERANCE


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _compare_times(rows: int, columns: int, device: torch.device) -> None:
    problem = Problem.random(rows, columns, (STUDENT_HIDDEN, TEACHER_HIDDEN), device)
    floor_s = _seconds(lambda: _floor(problem))
    print(f"GEMM floor ({rows} rows, {columns} columns): {floor_s * 1e3:.2f} ms", flush=True)
    steps: dict[str, Callable[[], object]] = {
        "keep, JSD": lambda: problem.gradients(_ours("jsd", 1 << 40)),
        "keep, FKL": lambda: problem.gradients(_ours("forward_kl", 1 << 40)),
        "recompute, JSD": lambda: problem.gradients(_ours("jsd", 512 << 20)),
        "full logits, JSD": lambda: problem.gradients(FullLogitsLoss("jsd", kd_weight=1.0, ce_weight=0.0)),
        "Liger, compiled": lambda: _liger(problem),
    }
    for name, step in steps.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            took_s = _seconds(step)
        except (ImportError, torch.cuda.OutOfMemoryError) as error:
            print(f"{name:<18} not measured: {type(error).__name__}", flush=True)
            continue
        peak_mb = (torch.cuda.max_memory_allocated() - before) / 1e6
        print(f"{name:<18} {took_s * 1e3:8.2f} ms {took_s / floor_s:6.2f} x floor {peak_mb:10,.0f} MB", flush=True)


def _ours(divergence: str, workspace_bytes: int) -> KDLoss:
    return KDLoss(divergence, kd_weight=1.0, ce_weight=0.0, workspace_bytes=workspace_bytes)


def _floor(problem: Problem) -> None:
    with torch.no_grad():
        for start in range(0, problem.student_states.shape[0], 512):
            student_RH = problem.student_states[start : start + 512]
            torch.mm(problem.teacher_states[start : start + 512], problem.teacher_weight.T)
            logits_RV = torch.mm(student_RH, problem.student_weight.T)
            torch.mm(logits_RV, problem.student_weight)
            torch.mm(logits_RV.T, student_RH)


def _liger(problem: Problem) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)
    heads = (problem.student_states, problem.student_weight, problem.teacher_states, problem.teacher_weight)
    loss(*heads, problem.labels).backward()


def _seconds(step: Callable[[], object]) -> float:
    """Median of a few; the first compiles and is not counted."""
    times = []
    for number in range(ROUNDS + 1):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number:
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
