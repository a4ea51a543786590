"""`python -m bench.claims.launched NOTE HEADROOM MODULE FLAGS...`: `python -m MODULE`, its imports told from the rest.

What a trainer imports takes memory that no plan is about, and so does what libraries load when they are first used. So
everything is imported first, and a model of a few kilobytes makes one step; then what is resident is written to the
file NOTE, and the peak counter starts anew. HEADROOM, in bytes, caps what the process may take from there on (0: no
cap). The cap is RLIMIT_DATA: what a process may write and shares with nobody, that is heap, anonymous
maps and stacks of threads. It needs no right and no cgroup; an allocation beyond it fails as on a full machine.
"""

from __future__ import annotations

import importlib
import os
import resource
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: What the commands import as they go.
IMPORTS = (
    *("datasets", "torch._inductor.config", "teacher.load", "teacher.service", "student.train.run"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
)
#: Buffers are maps of their own, given back when they are freed; threads get no heap and no more stack than they use.
#: Both count against the cap from the moment they are reserved, and so would the pool that Arrow reserves for itself.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
STACK_BYTES = 2 << 20


def main(argv: Sequence[str]) -> None:
    """Does not return where the module ends the process itself."""
    note, headroom, module, *flags = argv
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # The allocator reads them once, before Python runs; so is the size of a thread's stack.
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        command = [sys.executable, "-m", "bench.claims.launched", *argv]
        os.execve(sys.executable, command, os.environ | ENVIRONMENT)
    for name in IMPORTS:
        importlib.import_module(name)
    first_use()
    Path(note).write_text(str(field_bytes("VmRSS")))
    Path("/proc/self/clear_refs").write_text("5")
    if int(headroom):
        limit = field_bytes("VmData") + int(headroom)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def first_use() -> None:
    """One step of a tiny model in bf16 with the fused loss, and a table of one row: kernels, the threads of the
    backward pass and the like are there afterwards, as in any trainer."""
    import datasets
    import torch
    import transformers

    from student.loss import Head, KDLoss

    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        head = Head(weight=model.lm_head.weight)
        states, weight = torch.zeros(16, 32), torch.zeros(64, 32)
        loss: Any = KDLoss()(hidden, head, states, Head(weight=weight), ids.flatten()).loss
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), foreach=False).step()
    datasets.Dataset.from_list([{"input_ids": [0]}]).with_format("torch")[0]


def field_bytes(name: str, pid: int | str = "self") -> int:
    """A size of a process as the kernel counts it: VmRSS, VmHWM (its peak), VmData (private and writable).

    Raises OSError: the process is gone, or the kernel has no such field."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
