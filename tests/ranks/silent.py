"""`python -m tests.ranks.silent`: one rank of a vocabulary group whose last rank does not come to an exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from student.parallel.ranks import Ranks, launched

#: Of the world's beginning too.
TIMEOUT_S = 10.0


def main() -> None:
    launch = launched()
    assert launch is not None
    ranks = Ranks(launch, device=torch.device("cpu"), timeout_s=TIMEOUT_S, vocab_parallel=launch.world_size)
    assert ranks.vocab_mesh is not None
    assert ranks.vocab_mesh["vocab"].size() == launch.world_size
    assert ranks.vocab_mesh["data"].size() == 1
    if launch.rank < launch.world_size - 1:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=ranks.vocab_mesh.get_group("vocab"))
    # Patiently: the silent rank is there all the while.
    ranks.wait_for_all()


if __name__ == "__main__":
    main()
