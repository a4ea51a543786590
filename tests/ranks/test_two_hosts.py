"""Two hosts on one machine: a teacher on the one, two ranks on the other, each with addresses of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.cable import HOSTS, Cable, NoRights
from tests.ports import free_port
from tests.ranks.conftest import StartWorld
from tests.ranks.test_runs import assert_same_curve
from tests.rights import lack
from tests.system.conftest import Start

#: How states travel, and what UCX is told.
WAYS: dict[str, dict[str, str]] = {"zmq": {}, "ucx": {"UCX_TLS": "tcp"}}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_on_one_host_learn_from_a_teacher_on_another(
    one_rank_curve: list[dict[str, Any]], start_teacher: Start, start_world: StartWorld, way: str
) -> None:
    """Over a link that is late and narrow: 5 ms each way, 10 MB/s."""
    try:
        cable = Cable(seed=7)
    except NoRights as error:
        lack(f"no network namespaces: {error}")
    try:
        cable.be(0, 1, delay_s=0.005, rate_bytes_per_s=10e6)
        env = WAYS[way]
        far = start_teacher("--insecure", host=HOSTS[1], port=free_port(), namespaces=cable.namespaces[1], env=env)
        # The ranks find each other over the loopback of their host.
        env = {**env, "GLOO_SOCKET_IFNAME": "lo"}
        flags = ("--teacher", far.endpoint, "--insecure", "--transport", way, "--fsdp")
        world = start_world(*flags, size=2, env=env, namespaces=cable.namespaces[0])
        world.succeed()
        assert_same_curve(world.out, one_rank_curve)
        assert world.summary["transports"] == {far.endpoint: way}
        assert all(direction.forwarded > 0 for direction in cable.counts())
        world.end()
        far.end()
    finally:
        cable.close()
