"""Accelerators and links by name: capacity, rates of dense products, bandwidths.

Capacities are the vendors' gigabytes (1e9 bytes), a little less than the driver reports. Rates are the peaks of the
vendor's data sheets (A100, H100 SXM, H200 SXM, HGX B200, L40S, and the Ada architecture's white paper), without
sparsity: of bf16 on tensor cores, and of float32 on the others, since torch leaves TF32 off. What is reached of them is
the MFU, an assumption that the plan states.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """flops_per_s: of 16-bit products; fp32_flops_per_s: of float32 ones. peer_bytes_per_s: between GPUs of one node,
    each direction, per GPU."""

    name: str
    memory_bytes: int
    flops_per_s: float
    fp32_flops_per_s: float
    peer_bytes_per_s: float

    def rate(self, *, element_bytes: int) -> float:
        """FLOP/s of products of such numbers; of weights in less than 16 bits, of what they are widened to."""
        return self.fp32_flops_per_s if element_bytes == 4 else self.flops_per_s


@dataclass(frozen=True, kw_only=True)
class Link:
    """bytes_per_s: of one port, one direction, as sold; efficiency_frac: what a good stream reaches of it."""

    name: str
    bytes_per_s: float
    latency_s: float
    efficiency_frac: float

    @property
    def payload_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency_frac


def _gpu(name: str, memory_gb: int, tflops: float, fp32_tflops: float, peer_gbytes: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=memory_gb * 10**9,
        flops_per_s=tflops * 1e12,
        fp32_flops_per_s=fp32_tflops * 1e12,
        peer_bytes_per_s=peer_gbytes * 1e9,
    )


GPUS: dict[str, Gpu] = {
    gpu.name.lower(): gpu
    for gpu in (
        _gpu("A100-40", 40, 312, 19.5, 300),
        _gpu("A100-80", 80, 312, 19.5, 300),
        _gpu("H100-80", 80, 989, 67, 450),
        _gpu("H200-141", 141, 989, 67, 450),
        _gpu("B200", 180, 2250, 75, 900),
        # No NVLink: PCIe 4.0 x16.
        _gpu("L40S", 48, 362, 91.6, 32),
        _gpu("RTX4090", 24, 165, 82.6, 32),
    )
}


def _link(name: str, gbit: float, latency_us: float, efficiency_frac: float) -> Link:
    return Link(name=name, bytes_per_s=gbit * 1e9 / 8, latency_s=latency_us * 1e-6, efficiency_frac=efficiency_frac)


LINKS: dict[str, Link] = {
    link.name.lower(): link
    for link in (
        # Ethernet as TCP uses it, InfiniBand and RoCE as RDMA does.
        _link("10GbE", 10, 50, 0.90),
        _link("25GbE", 25, 50, 0.90),
        _link("100GbE", 100, 30, 0.90),
        _link("200GbE", 200, 30, 0.90),
        _link("400GbE", 400, 30, 0.90),
        _link("IB-100", 100, 5, 0.95),
        _link("IB-200", 200, 5, 0.95),
        _link("IB-400", 400, 5, 0.95),
        _link("NVLink", 3600, 5, 0.80),
    )
}


def find_gpu(name: str, *, flag: str) -> Gpu:
    """Raises PlanError: no preset of that name."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        allowed = ", ".join(gpu.name for gpu in GPUS.values())
        raise PlanError(f"{flag} {name}: no such preset; allowed: {allowed}") from None


def find_link(name: str, *, flag: str) -> Link:
    """Raises PlanError: no preset of that name."""
    try:
        return LINKS[name.lower()]
    except KeyError:
        allowed = ", ".join(link.name for link in LINKS.values())
        raise PlanError(f"{flag} {name}: no such preset; allowed: {allowed}") from None
