"""The ranks of a run: who they are, how they are grouped, and the few words that they exchange.

torchrun starts the processes and says in the environment who is who. Two kinds of exchange exist. Tensors go through
torch's collectives, on the device's own backend. Words (is everybody ready, is everybody's data the same) go over the
CPU, through a group of their own whose time-out says how long a silent rank is waited for.

Words are JSON in byte tensors, not torch's object collectives: those unpickle what they receive.
"""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ring.core.errors import ConfigError, DisaggKDError
from student.loss.collectives import all_gather

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=BaseException)

#: Parts of it have no types.
_torch: Any = dist

#: While one rank loads and tokenizes the others wait; one that ends is noticed at once all the same.
START_TIMEOUT_S = 4 * 3600.0
#: While one rank writes to a disk.
CHECKPOINT_TIMEOUT_S = 1800.0

#: Of an error that ends the run on every rank.
_KNOWN = "_is_known_to_all_ranks"


class RankFailed(DisaggKDError):
    """Another rank of the run failed; it says itself why, with the same exit code."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(DisaggKDError):
    """Another rank ended, or did not answer in time: nothing can be agreed on any more, not even a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What torchrun says to a process it starts. `restarts`: how often it has started this world anew. `run_id`: the
    same in all of its starts on this host, and in no other torchrun's."""

    rank: int
    world_size: int
    local_rank: int
    restarts: int
    run_id: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch | None:
        """None: not started by torchrun. Raises ConfigError: only in part, or with something that is no number."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environment]
        if "RANK" not in environment:
            return None
        if missing:
            raise ConfigError(
                f"environment: RANK without {', '.join(missing)}; allowed: all that torchrun sets, or none"
            )
        try:
            launch = cls(
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment["LOCAL_RANK"]),
                restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
                run_id=_run_id(environment),
            )
        except ValueError as error:
            raise ConfigError(f"environment: RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {error}") from error
        if not 0 <= launch.rank < launch.world_size:
            raise ConfigError(f"environment: RANK {launch.rank} of WORLD_SIZE {launch.world_size}; allowed: below it")
        return launch


class Ranks:
    """All ranks of the run, seen from one of them. `alone()` is a world of one that exchanges nothing."""

    def __init__(
        self,
        launch: Launch,
        *,
        device: torch.device,
        timeout_s: float,
        checkpoint_timeout_s: float = CHECKPOINT_TIMEOUT_S,
        vocab_parallel: int = 1,
        wants_groups: bool = False,
    ) -> None:
        """Meets the other ranks. timeout_s: how long a silent rank is waited for once the run is under way;
        checkpoint_timeout_s: where it may be writing to a disk.

        Raises ConfigError: the world can't be cut into vocabulary groups of that size. Raises RankLost: one does not
        come."""
        if launch.world_size % vocab_parallel:
            raise ConfigError(
                f"--vocab-parallel {vocab_parallel}: the world has {launch.world_size} ranks; allowed: a divisor of it"
            )
        self.rank, self.world_size, self.local_rank = launch.rank, launch.world_size, launch.local_rank
        self.device, self.timeout_s = device, timeout_s
        self.mesh: DeviceMesh | None = None
        self._words: dist.ProcessGroup | None = None
        self._patient: dist.ProcessGroup | None = None
        self._saving: dist.ProcessGroup | None = None
        self._background: dist.ProcessGroup | None = None
        self._vocab_mesh: DeviceMesh | None = None
        if device.type == "cuda" and device.index is not None:  # without a number it is the current one
            # FSDP, NCCL and a checkpoint's generators take the process's current device.
            torch.cuda.set_device(device)
        if launch.world_size == 1 and not wants_groups:
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self._lost_ranks():
            # Whoever embeds a trainer may have met the others already.
            if not dist.is_initialized():
                dist.init_process_group(
                    backend,
                    store=_meeting_place(launch),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
            self._words = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_TIMEOUT_S))
            self._saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=checkpoint_timeout_s))
            self._background = dist.new_group(backend="gloo", timeout=timedelta(seconds=checkpoint_timeout_s))
            self.mesh = init_device_mesh(device.type, (self.world_size,), mesh_dim_names=("world",))
            if vocab_parallel > 1:
                self._vocab_mesh = _mesh_of(device.type, self.world_size, vocab_parallel, timeout_s=timeout_s)

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        launch = Launch(rank=0, world_size=1, local_rank=0, restarts=0)
        return cls(launch, device=device, timeout_s=START_TIMEOUT_S)

    def begin_training(self) -> None:
        """All is loaded: from here on nothing takes longer than a checkpoint."""
        self._patient = self._saving

    def in_background(self) -> Ranks:
        """The same ranks for a thread of its own: its words never mix with those of the main thread."""
        ranks = copy.copy(self)
        ranks._words = ranks._patient = self._background
        return ranks

    @property
    def is_first(self) -> bool:
        """The rank that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        return self.world_size > 1

    @property
    def has_groups(self) -> bool:
        """Whether torch's collectives are there: they may be in a world of one too."""
        return self.mesh is not None

    @property
    def patient_group(self) -> dist.ProcessGroup | None:
        """For what may take long: loading until `begin_training`, then writing to a disk."""
        return self._patient

    @property
    def vocab_mesh(self) -> DeviceMesh | None:
        """Dimensions `data` and `vocab`; None where every rank has whole heads."""
        return self._vocab_mesh

    # ---- words -----------------------------------------------------------------------------------------------------

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Numbers of every rank, as many of each, in the order of the ranks. Raises RankLost."""
        if self._words is None:
            return [list(values)]
        return self._gather(torch.tensor(list(values), dtype=torch.int64), self._words).tolist()

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """As `gather`."""
        if self._words is None:
            return [list(values)]
        return self._gather(torch.tensor(list(values), dtype=torch.float64), self._words).tolist()

    def gather_words(self, words: object, *, patient: bool = False) -> list[Any]:
        """Anything that JSON can hold, of every rank. patient: some rank may take long. Raises RankLost."""
        group = self._patient if patient else self._words
        if group is None:
            return [json.loads(json.dumps(words))]
        own = json.dumps(words).encode()
        sizes = self._gather(torch.tensor([len(own)]), group).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        rows = self._gather(padded, group)
        return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def from_first(self, words: object) -> Any:
        """What rank 0 says, on every rank."""
        return self.gather_words(words if self.is_first else None)[0]

    def wait_for_all(self) -> None:
        """Returns once every rank is here. Raises RankLost: one has ended, or may take no longer."""
        self.gather_words(None, patient=True)

    def check_equal(self, what: str, value: object) -> None:
        """Raises ConfigError, on every rank: they don't all have the same. Of a map what differs is named."""
        check_equal(what, self.gather_words(value))

    def together(self, action: Callable[[], T]) -> T:
        """Do something that may fail on some ranks only, so that it then fails on all of them.

        Raises what `action` raises, here or (as RankFailed) elsewhere."""
        if self._patient is None:
            return action()
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - raised below, once the others know
            error = caught
        failure = None if error is None else [str(error), getattr(error, "exit_code", 1)]
        failures = self.gather_words(failure, patient=True)
        if error is not None:
            raise self.known_to_all(error)
        for rank, other in enumerate(failures):
            if other is not None:
                raise self.known_to_all(RankFailed(f"rank {rank} failed: {other[0]}", exit_code=int(other[1])))
        return result

    def known_to_all(self, error: ErrorT) -> ErrorT:
        """Mark what this rank raises once every rank knows that the run ends: they can still do things together."""
        # At the error itself: a list of them would keep all that their tracebacks hold.
        setattr(error, _KNOWN, True)
        return error

    def is_known_to_all(self, error: BaseException) -> bool:
        """Whether every rank ends with this error, or with its own of the same end."""
        return getattr(error, _KNOWN, False) is True

    def one_after_the_first(self, action: Callable[[], T]) -> T:
        """`action` on one rank of every machine, then on the others, which find in a cache what the first left."""
        if not self.are_many:
            return action()
        if self.local_rank == 0:
            done = self.together(action)
            self.together(lambda: None)
            return done
        self.together(lambda: None)
        return self.together(action)

    def _gather(self, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        gathered = own.new_empty(self.world_size, *own.shape)
        with self._lost_ranks():
            all_gather(gathered.view(-1), own.view(-1), group)
        return gathered

    def failure_of(self, error: Exception) -> RankLost:
        """What an error in the midst of a step means for the run: the others are not asked any more."""
        lines = str(error).splitlines() or [""]
        return RankLost(
            f"rank {self.rank}: {type(error).__name__}: {lines[0]} (where another rank has ended, its own words say "
            f"why)"
        )

    @contextmanager
    def _lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank}: another rank ended, or was silent for longer than --rank-timeout (in a checkpoint: "
                f"--checkpoint-timeout): {str(error).splitlines()[0]}"
            ) from error

    def part(self) -> None:
        """The end of a run that all ranks agree on. After a failure there is nothing to wait for: the process ends."""
        if self._words is not None:
            dist.destroy_process_group()


def _run_id(environment: Mapping[str, str]) -> str:
    """torchrun's own (its default is "none") does not do, since scripts give one to many runs; so with the process that
    started this one: on each host torchrun is another."""
    given = environment.get("TORCHELASTIC_RUN_ID", "none")
    starter = Path(f"/proc/{os.getppid()}/stat")
    # Behind the name, in which anything may stand: the 22nd field says when the process began.
    began = starter.read_text(errors="replace").rpartition(")")[2].split()[19] if starter.exists() else ""
    return f"{given} by process {os.getppid()} {began} of {socket.gethostname()}"


def _meeting_place(launch: Launch) -> PrefixStore:
    """The store in which ranks find each other's addresses, as the environment names it.

    torchrun keeps one server over restarts (torch 2.13), and gloo writes under the same names each time: a rank of the
    new world could read the address of a dead one. So every start has names of its own."""
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size))
    return PrefixStore(f"start-{launch.restarts}", store)


def _mesh_of(device_type: str, world_size: int, vocab_parallel: int, *, timeout_s: float) -> DeviceMesh:
    """The ranks as a table, a vocabulary group a line. A mesh that made its groups itself would wait as torch does."""
    table = torch.arange(world_size).view(-1, vocab_parallel)
    groups = [
        _torch.new_subgroups_by_enumeration(lines.tolist(), timeout=timedelta(seconds=timeout_s))[0]
        for lines in (table.T, table)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=table, mesh_dim_names=("data", "vocab"))


def check_equal(what: str, values: Sequence[Any]) -> None:
    """Raises ConfigError: the ranks' values are not all the same."""
    first = values[0]
    for rank, other in enumerate(values):
        if other == first:
            continue
        theirs, ours = other, first
        if isinstance(first, dict):
            names = [name for name in first if other.get(name) != first[name]]
            theirs, ours = ({name: map_.get(name) for name in names} for map_ in (other, first))
        raise ConfigError(f"{what}: rank 0 has {ours}, rank {rank} has {theirs}; allowed: the same on all")


def launched() -> Launch | None:
    """What torchrun says to this process, if it did start it."""
    return Launch.from_environment(os.environ)
