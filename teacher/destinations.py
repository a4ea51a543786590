"""Where an OFFER may have a teacher connect to.

The student says where its slots are, so a teacher that believed everything could be made to knock at any address that
its machine reaches, or to send states in the clear where its user asked for keys.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ring.core.errors import RemoteProtocolError
from ring.core.messages import Offer
from ring.endpoints import is_loopback, parse_endpoint


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """within_machine: nothing beyond it, since the teacher itself listens on loopback only. with_keys: beyond it, what
    can be encrypted has to be."""

    within_machine: bool = False
    with_keys: bool = False

    @staticmethod
    def of(listen: str, *, with_keys: bool) -> Destinations:
        """For a teacher that listens there. Raises ConfigError: it is no endpoint."""
        host, _ = parse_endpoint(listen, flag="--listen")
        return Destinations(within_machine=is_loopback(host), with_keys=with_keys)

    def check(self, offer: Offer) -> None:
        """Raises RemoteProtocolError: the teacher must not go there."""
        host = _host_of(offer)
        if host is None:
            return
        try:
            # Names are not looked up: that would be asking whomever the student wants us to ask.
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise RemoteProtocolError(f"{offer.backend} at {host[:64]!r}; allowed: an IP address") from None
        if address.is_loopback:
            return
        if self.within_machine:
            raise RemoteProtocolError(
                f"{offer.backend} at {address}, while the teacher listens on loopback only; allowed: a loopback address"
            )
        if self.with_keys and offer.backend == "zmq" and "server_key" not in offer.description:
            raise RemoteProtocolError(f"zmq at {address} without keys; allowed: encrypted, as the teacher has --auth")


def _host_of(offer: Offer) -> str | None:
    """None: it is within the machine by its nature, or says nothing that makes sense, which the backend will tell."""
    if offer.backend == "zmq" and isinstance(endpoint := offer.description.get("endpoint"), str):
        return endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else None
    if offer.backend == "ucx" and isinstance(host := offer.description.get("host"), str):
        return host
    return None
