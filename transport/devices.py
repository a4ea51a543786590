"""Devices of this machine, for the transports that UCX stands behind: RDMA ports, and interfaces by their address."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from ring.core.errors import ConfigError, TransportError
from transport.host import remedy

INFINIBAND = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915


def rdma_devices() -> list[str]:
    """The RDMA devices of this machine with an active port, as UCX calls them."""
    found = []
    for state in sorted(INFINIBAND.glob("*/ports/*/state")):
        if "ACTIVE" in state.read_text():
            found.append(f"{state.parts[-4]}:{state.parts[-2]}")
    return found


def local_address(local_host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The one address that the name or address stands for. Raises ConfigError: it stands for none, or for every.
    Raises TransportError: no descriptor is left to find out with."""
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(local_host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        _check_descriptors(local_host, error)
        raise ConfigError(f"{local_host!r} is not an address of this machine: {error}") from error
    if address.is_unspecified:
        raise ConfigError(f"{local_host!r} is every address; give the one that the other side can reach")
    return address


def net_devices(local_host: str) -> str | None:
    """What UCX may use for a channel at that local address: its interface, and the RDMA devices unless it is loopback.

    None: whatever UCX finds. Raises ConfigError: it is not an address of this machine. Raises TransportError: no
    descriptor is left to find out with."""
    address = local_address(local_host)
    try:
        name = interface_of(address)
        others = [] if address.is_loopback or name is None else rdma_devices()
    except OSError as error:
        _check_descriptors(local_host, error)
        raise ConfigError(f"{local_host!r} is not an address of this machine: {error}") from error
    if address.is_loopback:
        return name
    return None if name is None else ",".join([name, *others])


def _check_descriptors(local_host: str, error: OSError) -> None:
    """Raises TransportError: it says that none is left to find out with."""
    if remedy(error):
        raise TransportError(f"the interface of {local_host!r} can't be told: {error}{remedy(error)}") from error


def interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """The name of the interface that has this address; None: it can't be told. Raises ConfigError: none has it."""
    if address.is_loopback:
        return "lo"
    if address.version == 6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            if int(number, 16) == int(address):
                return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:
                continue  # it has no address
            if found[20:24] == address.packed:
                return name
    return None  # a second address of an interface


def local_host_towards(host: str) -> str:
    """The address of this machine that reaches the host. Raises TransportError: none does."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only asks the routing table.
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"{host!r} can't be reached from here: {error}{remedy(error)}") from error
