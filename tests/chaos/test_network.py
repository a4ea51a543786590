"""Networks that are slow, lossy or cut, in network namespaces of the test's own: the curve does not notice."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.cable import HOSTS, Cable, NoRights
from tests.chaos.conftest import Quiet, Start
from tests.ports import free_port
from tests.rights import lack
from tests.system.processes import Student, curve

pytestmark = pytest.mark.slow

CUT_S = 10.0
#: The link between trainer and replica carries these; shm does not leave a machine.
WAYS: dict[str, tuple[tuple[object, ...], dict[str, str]]] = {
    "zmq": (("--transport", "zmq"), {}),
    "ucx": (("--transport", "ucx"), {"UCX_TLS": "tcp"}),
}
EARLY = 8


@pytest.fixture
def cable(chaos_seed: int) -> Iterator[Cable]:
    try:
        made = Cable(seed=chaos_seed)
    except NoRights as error:
        lack(f"no network namespaces: {error}")
    print(f"TEST_SEED={chaos_seed}")
    yield made
    made.close()


@pytest.fixture
def ends(cable: Cable, start_teacher: Start, start_student: Start, request: pytest.FixtureRequest) -> Any:
    """(start a teacher at the far end, start one beside the student, start the student)."""

    def far(*arguments: object, env: dict[str, str]) -> Any:
        options = {"host": HOSTS[1], "port": free_port(), "namespaces": cable.namespaces[1], "env": env}
        return start_teacher("--insecure", *arguments, **options)

    def near(*, env: dict[str, str]) -> Any:
        return start_teacher(port=free_port(), namespaces=cable.namespaces[0], env=env)

    def train(*arguments: object, env: dict[str, str]) -> Any:
        return start_student(*arguments, "--insecure", namespaces=cable.namespaces[0], env=env)

    return far, near, train


def stop_and_compare(student: Student, quiet_curve: Quiet) -> None:
    student.send(signal.SIGTERM)
    assert student.wait() == 128 + signal.SIGTERM, student.tail()
    taken = student.steps_taken
    assert curve(student.out) == quiet_curve(11, taken)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "behaviour",
    [
        {"delay_s": 0.02, "jitter_s": 0.01},
        {"delay_s": 0.002, "jitter_s": 0.002, "loss_frac": 0.02, "double_frac": 0.02},
        {"rate_bytes_per_s": 200_000.0},
    ],
    ids=["late", "lossy", "slow"],
)
def test_a_bad_link_changes_how_long_it_takes_and_nothing_else(
    cable: Cable, ends: Any, quiet_curve: Quiet, way: str, behaviour: dict[str, float]
) -> None:
    far, _, train = ends
    flags, env = WAYS[way]
    cable.be(**behaviour)
    teacher = far(env=env)
    student = train("--teacher", teacher.endpoint, *flags, env=env)
    student.until_step(30)
    stop_and_compare(student, quiet_curve)
    assert student.summary["transports"] == {teacher.endpoint: flags[1]}
    for direction in cable.counts():
        assert direction.forwarded > 100
        assert (direction.lost > 0) is ("loss_frac" in behaviour)
        assert (direction.doubled > 0) is ("double_frac" in behaviour)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("directions", [(0, 1), (0,), (1,)], ids=["both ways", "to the teacher", "to the student"])
def test_a_replica_behind_a_cut_link_loses_its_requests_and_is_used_again_when_it_heals(
    cable: Cable, ends: Any, quiet_curve: Quiet, way: str, directions: tuple[int, ...]
) -> None:
    """The connections stay half open: nobody says a word to either end. The replica has room for one student: that
    which it takes for another one is the same, and must not be turned away."""
    far, near, train = ends
    flags, env = WAYS[way]
    # Slow enough that some fill is on its way whenever the link is cut.
    cable.be(rate_bytes_per_s=200_000.0)
    remote, local = far("--max-students", 1, "--student-timeout", 100_000, env=env), near(env=env)
    student = train(
        *("--teacher", remote.endpoint, local.endpoint, *flags, "--peer-timeout", 2, "--request-timeout", 20), env=env
    )
    up, lost = f"replica up: {remote.endpoint}", f"replica lost: {remote.endpoint}"

    def is_up() -> bool:
        return student.errors.count(up) > student.errors.count(lost)

    student.until(lambda: is_up() and student.steps_taken >= EARLY, "both are used")
    # It may have been lost and found before: a machine that has no time for it for two seconds is enough.
    cable.cut(*directions)
    healed_s = time.monotonic() + CUT_S
    student.until(lambda: not is_up(), "the cut is noticed")
    at_cut = student.steps_taken
    student.until(lambda: time.monotonic() >= healed_s and student.steps_taken > at_cut, "the other one serves it")
    assert not is_up()
    cable.heal()
    student.until(is_up, "the replica is there again")
    local.send(signal.SIGKILL)
    local.wait()
    student.until_step(student.steps_taken + 20)
    stop_and_compare(student, quiet_curve)
    assert remote.poll() is None


@pytest.mark.parametrize("way", WAYS)
def test_a_run_whose_only_replica_is_behind_a_cut_link_waits_and_goes_on(
    cable: Cable, ends: Any, quiet_curve: Quiet, way: str
) -> None:
    far, _, train = ends
    flags, env = WAYS[way]
    cable.be(rate_bytes_per_s=200_000.0)
    teacher = far(env=env)
    student = train("--teacher", teacher.endpoint, *flags, "--peer-timeout", 2, env=env)
    student.until_step(EARLY)
    losses = student.errors.count(f"replica lost: {teacher.endpoint}")
    cable.cut()
    healed_s = time.monotonic() + CUT_S
    student.until(lambda: time.monotonic() >= healed_s, "the link is cut long enough")
    student.until(lambda: student.errors.count(f"replica lost: {teacher.endpoint}") > losses, "the cut is noticed")
    cable.heal()
    at_heal = student.steps_taken
    student.until_step(at_heal + 20)
    stop_and_compare(student, quiet_curve)
