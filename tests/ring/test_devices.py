"""--device of either side: tried at once, and what can't be used is one line."""

from __future__ import annotations

import pytest
import torch

from ring.core.errors import ConfigError
from ring.devices import find_device


@pytest.mark.parametrize("name", ["meta", "hpu", "privateuseone", "gpu", "cuda:99", ""])
def test_what_is_no_device_that_can_be_used_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--device {name}: .*; allowed: auto, cpu, cuda, cuda:N$"):
        find_device(name, flag="--device")


def test_where_auto_chose_what_can_not_be_used_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is full, or taken by another process: this build of torch has none at all."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of memory")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"^--device auto cuda: .*; allowed: cpu, cuda:N$"):
        find_device("auto", flag="--device")


def test_each_rank_of_a_machine_has_a_device_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^--device cuda:99: "):
        find_device("cuda", flag="--device", local_rank=99)
    assert find_device("cpu", flag="--device", local_rank=1) == torch.device("cpu")
