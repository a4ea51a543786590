"""The state of every random generator that training draws from, as plain data for a checkpoint."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ring.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RngState:
    """torch's generators, Python's and numpy's, of one process. torch_cuda: one, of the device that it trains on; none
    without one; an older checkpoint has those of all devices of the host, and not which of them it was."""

    torch_cpu: bytes
    torch_cuda: tuple[bytes, ...]
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[bytes, int, int, float]

    def to_json(self) -> dict[str, Any]:
        version, words, gauss = self.python
        key, place, has_gauss, cached = self.numpy
        return {
            "torch_cpu": _text(self.torch_cpu),
            "torch_cuda": [_text(state) for state in self.torch_cuda],
            "python": [version, list(words), gauss],
            "numpy": [_text(key), place, has_gauss, cached],
        }

    @classmethod
    def from_json(cls, value: Any) -> RngState:
        """Raises KeyError, TypeError or ValueError: not what `to_json` gives."""
        version, words, gauss = value["python"]
        key, place, has_gauss, cached = value["numpy"]
        return cls(
            torch_cpu=_bytes(value["torch_cpu"]),
            torch_cuda=tuple(_bytes(state) for state in value["torch_cuda"]),
            python=(int(version), tuple(int(word) for word in words), None if gauss is None else float(gauss)),
            numpy=(_bytes(key), int(place), int(has_gauss), float(cached)),
        )


def capture_rng() -> RngState:
    """The generators as they stand now."""
    version, words, gauss = random.getstate()
    _, key, place, has_gauss, cached = np.random.get_state(legacy=True)
    return RngState(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        # Of the current device, whatever its number: on another host, or with other devices visible, the same rank may
        # have another one. Those of the others are not this process's, and asking would open a context on each.
        torch_cuda=(torch.cuda.get_rng_state().numpy().tobytes(),) if torch.cuda.is_available() else (),
        python=(version, words, gauss),
        numpy=(np.asarray(key, dtype="<u4").tobytes(), int(place), int(has_gauss), float(cached)),
    )


def restore_rng(state: RngState) -> None:
    """Puts the generators back; that of a CUDA device only where there is one.

    The last thing before the first resumed step: whatever is built after it may draw from them. Raises ConfigError:
    that is no state of theirs.
    """
    try:
        _restore(state)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the random generators can't be put back as a checkpoint has them: {reason}") from error


def _restore(state: RngState) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    if state.torch_cuda and torch.cuda.is_available():
        if len(state.torch_cuda) > 1:
            raise ValueError(f"it has those of {len(state.torch_cuda)} CUDA devices, and not which was this rank's")
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.torch_cuda[0]), dtype=torch.uint8))
    random.setstate(state.python)
    key, place, has_gauss, cached = state.numpy
    np.random.set_state(("MT19937", np.frombuffer(key, dtype="<u4").astype(np.uint32), place, has_gauss, cached))


def seed_rng(*words: int) -> None:
    """Seeds every generator anew; other words (not negative) make other generators, however alike they are."""
    torch_seed, python_seed, numpy_seed = np.random.SeedSequence(words).generate_state(3, np.uint64).tolist()
    torch.manual_seed(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed % 2**32)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
