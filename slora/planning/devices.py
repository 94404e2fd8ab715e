"""The devices that `slora plan` knows, with figures from data sheets, and the slices that a GPU can be divided into.

Memory is the size that the driver reports for the whole GPU. FLOP/s count dense 16-bit matrix products. Bandwidth to
the host is the bandwidth of the PCIe link in one direction. Bandwidth between GPUs is that of NVLink.

MIG divides a GPU into slices, each with its own compute, memory and bandwidth (NVIDIA's MIG user guide). For example,
profile `2g.20gb` has 2 sevenths of the compute, and 2 eighths of the memory and its bandwidth. MPS lets processes
share a GPU without this isolation. Here an MPS share of N percent has N percent of every resource, as is the case
while all shares are busy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slora.core.errors import ConfigError

_MIB = 1 << 20
_COMPUTE_PARTS, _MEMORY_PARTS = 7, 8
# The driver reports this share of the nominal memory of a MIG slice.
_MIG_MEMORY_SHARE = 0.95
_MPS_SHARE = re.compile(r"([1-9][0-9]?|100)%")


@dataclass(frozen=True, slots=True)
class MigProfile:
    """The size of a MIG slice. compute: sevenths of the GPU. memory: eighths of the GPU."""

    compute: int
    memory: int

    @property
    def count(self) -> int:
        """Number of slices of this profile that fit on one GPU."""
        return min(_COMPUTE_PARTS // self.compute, _MEMORY_PARTS // self.memory)


def _profiles(*names: str) -> Mapping[str, MigProfile]:
    """Returns the profiles of a GPU by name. names: one for each entry of `sizes`, in order."""
    sizes = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8))
    return {name: MigProfile(*size) for name, size in zip(names, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or one of `count` equal slices of it."""

    name: str
    memory_bytes: int
    bandwidth: float  # Of the device's memory, in bytes per second.
    flops: float  # Floating-point operations per second.
    host_bandwidth: float  # Of the link to the host.
    has_fp8: bool = True  # Whether it computes with 8-bit floats (compute capability 8.9 or later).
    profiles: Mapping[str, MigProfile] = field(default_factory=dict)
    count: int = 1
    # Of the link to other GPUs in one direction; None if they are connected through the host.
    link_bandwidth: float | None = None

    @property
    def sum_bandwidth(self) -> float:
        """The bandwidth for sums over several GPUs."""
        return self.link_bandwidth or self.host_bandwidth


def _device(
    name: str, memory_mib: int, gb_per_s: float, tflops: float, host_gb_per_s: float, **more: object
) -> Device:
    return Device(name, memory_mib * _MIB, gb_per_s * 1e9, tflops * 1e12, host_gb_per_s * 1e9, **more)  # type: ignore[arg-type]


_GB_40 = _profiles("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
_GB_80 = _profiles("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
_GB_141 = _profiles("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")
_GB_180 = _profiles("1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb")

# From small to large, so that the first device with enough capacity is the smallest.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("L4", 23_034, 300, 121, 32),
        _device("A10G", 23_028, 600, 70, 16, has_fp8=False),
        _device("RTX-4090", 24_564, 1008, 165, 32),
        _device("A100-40", 40_960, 1555, 312, 32, has_fp8=False, profiles=_GB_40, link_bandwidth=300e9),
        _device("L40S", 46_068, 864, 362, 32),
        _device("A100-80", 81_920, 2039, 312, 32, has_fp8=False, profiles=_GB_80, link_bandwidth=300e9),
        _device("H100", 81_559, 3350, 989, 64, profiles=_GB_80, link_bandwidth=450e9),
        _device("H200", 143_771, 4800, 989, 64, profiles=_GB_141, link_bandwidth=450e9),
        _device("B200", 183_359, 8000, 2250, 64, profiles=_GB_180, link_bandwidth=900e9),
    )
}


def find_device(name: str) -> Device:
    """Finds a device by its name, ignoring case. Raises ConfigError with the known names for an unknown name."""
    key = name.strip().upper().replace("_", "-").replace(" ", "-")
    device = DEVICES.get({"RTX4090": "RTX-4090", "4090": "RTX-4090"}.get(key, key))
    if device is None:
        raise ConfigError(
            f"device is {name!r}; known devices are {', '.join(DEVICES)}; describe another one with "
            "device_memory, bandwidth and flops"
        )
    return device


def cut_device(device: Device, name: str) -> Device:
    """Returns one slice of a device. name: a MIG profile such as 1g.10gb, or an MPS share such as 25%.

    Raises ConfigError for a profile that the device does not have.
    """
    if share := _MPS_SHARE.fullmatch(name):
        part = int(share[1]) / 100
        return _cut(device, f"{device.name} {name}", part, part, part, int(1 / part))
    profile = device.profiles.get(name.lower())
    if profile is not None:
        compute, memory = profile.compute / _COMPUTE_PARTS, profile.memory / _MEMORY_PARTS
        return _cut(
            device,
            f"{device.name} {name.lower()}",
            compute,
            memory,
            memory * _MIG_MEMORY_SHARE,
            profile.count,
        )
    if not device.profiles:
        raise ConfigError(
            f"slice is {name!r}, but {device.name} has no MIG profiles; give an MPS share such as 50%"
        )
    raise ConfigError(
        f"slice is {name!r}; {device.name} has the MIG profiles {', '.join(device.profiles)}, and any device "
        "can be shared by MPS, such as 50%"
    )


def _cut(device: Device, name: str, compute: float, bandwidth: float, memory: float, count: int) -> Device:
    return replace(
        device,
        name=name,
        memory_bytes=int(device.memory_bytes * memory),
        bandwidth=device.bandwidth * bandwidth,
        flops=device.flops * compute,
        host_bandwidth=device.host_bandwidth * bandwidth,
        profiles={},
        count=count,
    )
