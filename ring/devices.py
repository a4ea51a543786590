"""The device that --device names, on either side: tried before anything is loaded onto it."""

from __future__ import annotations

import torch

from ring.core.errors import ConfigError


def find_device(name: str | torch.device, *, flag: str, local_rank: int | None = None) -> torch.device:
    """A device that is there and can be used. name: auto (cuda where there is one), cpu, cuda or cuda:N.

    flag: what to call it in an error. local_rank: of several ranks on a machine, each of which has a CUDA device of its
    own; None: there is one.
    Raises ConfigError: no such device, or it can't be used (full, taken by another process, too old for this torch)."""
    chosen, allowed = str(name), "auto, cpu, cuda, cuda:N"
    if chosen == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen == "cuda" and local_rank is not None:
        chosen = f"cuda:{local_rank}"
    try:
        device = torch.device(chosen)
        torch.zeros(1, device=device).item()  # what it holds can be read, which an empty tensor would not show
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if name == "auto":
            flag, allowed = f"{flag} auto", "cpu, cuda:N"
        raise ConfigError(f"{flag} {chosen}: {reason}; allowed: {allowed}") from error
    return device
