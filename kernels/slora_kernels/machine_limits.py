"""The cores, CPU time and memory that this process may use. Everything that sizes threads, pools and caches asks here.

A control group (cgroup) limits a container, a systemd unit or a batch job. Each ancestor of a group limits it as well,
so the smallest limit counts. The files are those of cgroups v1, v2 or both at once: /proc/self/cgroup names the group
of this process in each hierarchy, and /proc/self/mountinfo says where the hierarchy is mounted.

A container usually sees its own group as the root of the mount. Then the limits of the groups above are not visible.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")
# cgroups v1 writes the largest multiple of a page that fits into 63 bits if there is no limit.
_NO_LIMIT = 1 << 62
_MIN_FREE_BYTES = 1 << 28


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo. root: the directory of the file system that is mounted at `point`."""

    root: PurePosixPath
    point: PurePosixPath
    kind: str
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """A control group with a memory limit. used: the file with the bytes in use. inactive: the name, in the file
    `statistics`, of cached file content that the kernel drops first.
    """

    limit: int
    used: Path
    statistics: Path
    inactive: str

    def free_bytes(self) -> int:
        used = _read_number(self.used) or 0
        for line in _read_text(self.statistics).splitlines():
            name, _, value = line.partition(" ")
            if name == self.inactive:
                used -= int(value)
        return self.limit - max(0, used)


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """root: the directory that stands for `/`. cpu_quota: CPU seconds per second; None without a limit."""

    root: Path
    cpu_quota: float | None
    memory_groups: tuple[_MemoryGroup, ...]

    @property
    def cores(self) -> list[int]:
        """The cores that this thread may use. A cpuset of the control group limits them, too."""
        return sorted(os.sched_getaffinity(0))

    @property
    def num_threads(self) -> int:
        """How many threads can compute at the same time.

        A quota is rounded down: the kernel stops all threads of the group for the rest of a period (100 ms) once they
        have used its quota, and threads that wait for one another use it up without computing.
        """
        num_cores = len(self.cores)
        return num_cores if self.cpu_quota is None else max(1, min(num_cores, int(self.cpu_quota)))

    @property
    def memory_bytes(self) -> int | None:
        """The smallest memory limit of the control groups; None without a limit."""
        return min((group.limit for group in self.memory_groups), default=None)

    def free_memory_bytes(self) -> int:
        """Bytes that this process can still allocate, by the machine and by each control group; at least 256 MiB."""
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in _read_text(self.root / "proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        return max(_MIN_FREE_BYTES, min([available, *(group.free_bytes() for group in self.memory_groups)]))


@cache
def machine_limits() -> MachineLimits:
    """The limits of this process. The files of the control groups are read once."""
    return read_machine_limits()


def read_machine_limits(root: Path = _ROOT) -> MachineLimits:
    """Reads the limits from the files below `root`. A file that does not exist or has no number sets no limit."""
    cpu, memory = list(find_groups(root, "cpu")), list(find_groups(root, "memory"))
    quotas = [quota for group in cpu if (quota := _read_cpu_quota(group)) is not None]
    groups = [found for group in memory if (found := _read_memory_group(group)) is not None]
    return MachineLimits(root, min(quotas, default=None), tuple(groups))


def read_mounts(root: Path = _ROOT) -> Iterator[Mount]:
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, details = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(details) >= 3:
            options = frozenset(details[2].split(","))
            yield Mount(_unescape(fields[3]), _unescape(fields[4]), details[0], options)


def _unescape(text: str) -> PurePosixPath:
    """The kernel writes spaces and other separators in paths as octal escapes."""
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text))


def find_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the directory of this process's group and those of its visible ancestors, for v1 and for v2."""
    mounts = list(read_mounts(root))
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0":
            found = [mount for mount in mounts if mount.kind == "cgroup2"]
        elif controller in controllers.split(","):
            found = [mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options]
        else:
            continue
        yield from _list_ancestors(root, PurePosixPath(name), found)


def _list_ancestors(root: Path, group: PurePosixPath, mounts: list[Mount]) -> Iterator[Path]:
    """Yields the group's directory and all above it, in the mount that shows the most of them.

    If no mount shows the group, such as in a container without a namespace of its own for control groups, yields the
    directories of the mounts: each limits the container.
    """
    showing = [mount for mount in mounts if ".." not in group.parts and group.is_relative_to(mount.root)]
    if not showing:
        yield from (root / mount.point.relative_to("/") for mount in mounts)
        return
    mount = min(showing, key=lambda mount: len(mount.root.parts))
    top = root / mount.point.relative_to("/")
    inner = group.relative_to(mount.root)
    yield from (top / part for part in (inner, *inner.parents))


def _read_cpu_quota(group: Path) -> float | None:
    """The CPU seconds per second that the group may use; None without a limit."""
    quota, _, period = _read_text(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read_text(group / "cpu.cfs_quota_us").strip()
        period = _read_text(group / "cpu.cfs_period_us").strip()
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None
    return int(quota) / int(period)


def _read_memory_group(group: Path) -> _MemoryGroup | None:
    """Reads the limit of one group. `memory.high` counts too, because the kernel slows down a group that exceeds it."""
    limits = [_read_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
    if not known:
        return None
    is_v1 = limits[2] is not None
    used, inactive = (
        ("memory.usage_in_bytes", "total_inactive_file") if is_v1 else ("memory.current", "inactive_file")
    )
    return _MemoryGroup(min(known), group / used, group / "memory.stat", inactive)


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
