"""L9 without a GPU: the kernels are right where triton interprets them, and compile for the GPUs that they are for.

Slow, and run with the extra `triton`: `make test-slow` installs it. Without it these fail; they are never skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from student.loss.divergences import DIVERGENCES

pytestmark = pytest.mark.slow

FLOAT, INT = "fp32", "i32"
HEAD = {"student_inner": FLOAT, "teacher_inner": FLOAT, "temperature": FLOAT, "num_columns": INT}
LOGITS = {
    "student_ptr": "*fp32",
    "student_stride": INT,
    "teacher_ptr": "*fp32",
    "teacher_stride": INT,
    "table_ptr": "*fp32",
    "table_stride": INT,
}
OPTIONAL = {
    "student_bias_ptr": "*fp32",
    "teacher_bias_ptr": "*fp32",
    "teacher_scale_ptr": "*fp32",
    "student_outer": FLOAT,
    "teacher_outer": FLOAT,
}
LABEL = {"label_ptr": "*i64", "label_hit_ptr": "*fp32"}


def test_kernels_equal_the_oracle_where_triton_interprets_them() -> None:
    cases = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def compiled(kernel: Any, signature: dict[str, str], flags: dict[str, Any], capability: int, *, full: bool) -> bytes:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = dict(flags)
    types = dict(signature)
    if full:
        types |= OPTIONAL
    else:
        constants |= dict.fromkeys(OPTIONAL)
    types |= dict.fromkeys(constants, "constexpr")
    ordered = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants)
    found = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    cubin: bytes = found.asm["cubin"]
    return cubin


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "bias, cap and scale"])
def test_kernels_compile_for_the_gpus_that_they_are_for(capability: int, full: bool) -> None:
    import student.loss.triton_kernels as kernels

    for side in (0, 1, 2):
        flags = {"HAS_TEACHER": side != 0, "HAS_LABEL": True, "HAS_LABEL_SUM": full, "RATIO_SIDE": side, "BLOCK": 4096}
        types = LOGITS | LABEL | HEAD
        assert compiled(kernels.statistics_kernel, types, flags, capability, full=full).startswith(b"\x7fELF")
    for name, number in kernels.KERNEL_DIVERGENCES.items():
        entry = DIVERGENCES[name]
        if entry.num_passes == 2:
            types = LOGITS | HEAD | {"gap_ptr": "*fp32", "seconds_ptr": "*fp32", "seconds_stride": INT, "mix": FLOAT}
            flags = {"DIVERGENCE": number, "BLOCK": 4096}
            assert compiled(kernels.second_kernel, types, flags, capability, full=full).startswith(b"\x7fELF")
        grad = {"grad_ptr": "*fp32" if full else "*bf16", "grad_stride": INT}
        types = LOGITS | LABEL | HEAD | grad | {"gap_ptr": "*fp32", "mix": FLOAT}
        types |= {"factor_ptr": "*fp32", "factor_stride": INT}
        flags = {
            "DIVERGENCE": number,
            "HAS_TEACHER": True,
            "HAS_SLOPE": name != "forward_kl",
            "HAS_TEACHER_SLOPE": entry.teacher_slope != 0,
            "HAS_CE": True,
            "HAS_LABEL_SUM": full,
            "BLOCK": 4096,
        }
        assert compiled(kernels.gradient_kernel, types, flags, capability, full=full).startswith(b"\x7fELF")
