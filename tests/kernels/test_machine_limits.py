import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slora_kernels import machine_limits as machine
from slora_kernels.machine_limits import MachineLimits, read_machine_limits, read_mounts

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
V1_UNLIMITED = "9223372036854771712"
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
# How distributions mount v1: two controllers share a hierarchy, and another hierarchy has none.
V1 = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
34 31 0:32 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd"""


def read(root: Path, groups: str, mounts: str, **files: str) -> MachineLimits:
    """files: the files below /sys/fs/cgroup."""
    contents = {"proc/self/cgroup": groups + "\n", "proc/self/mountinfo": mounts + "\n"}
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    contents["proc/meminfo"] = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return read_machine_limits(root)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("quota", "num_threads"), [("max", 8), ("50000", 1), ("100000", 1), ("250000", 2), ("9000000", 8)]
)
def test_threads_are_as_many_as_a_quota_lets_compute_at_once(
    tmp_path: Path, quota: str, num_threads: int
) -> None:
    v2 = read(tmp_path / "v2", "0::/a", V2, **{"a/cpu.max": f"{quota} 100000\n"})
    v1_quota = {"max": "-1"}.get(quota, quota)
    v1 = {"cpu.cfs_quota_us": f"{v1_quota}\n", "cpu.cfs_period_us": "100000\n"}
    files = {f"cpu,cpuacct/a/{name}": text for name, text in v1.items()}
    for limits in (v2, read(tmp_path / "v1", "4:cpu,cpuacct:/a", V1, **files)):
        assert limits.num_threads == num_threads


def test_the_limit_of_every_ancestor_counts_in_v2(tmp_path: Path) -> None:
    limits = read(
        tmp_path, "0::/system.slice/slora.service/inner", V2,
        **{
            "system.slice/memory.max": f"{4 * GIB}\n",
            "system.slice/memory.current": f"{GIB}\n",
            "system.slice/cpu.max": "300000 100000\n",
            "system.slice/slora.service/memory.max": "max\n",
            "system.slice/slora.service/memory.high": f"{3 * GIB}\n",
            "system.slice/slora.service/memory.current": f"{GIB}\n",
            "system.slice/slora.service/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
            "system.slice/slora.service/cpu.max": "150000 50000\n",
            "system.slice/slora.service/inner/memory.max": "max\n",
            "system.slice/slora.service/inner/cpu.max": "max 100000\n",
            "other/memory.max": "1\n",
        },
    )  # fmt: skip
    assert limits.memory_bytes == 3 * GIB and limits.cpu_quota == 3
    # The kernel drops cached file content first, so it counts as free.
    assert limits.free_memory_bytes() == 3 * GIB - GIB // 2


def test_the_limit_of_every_ancestor_counts_in_v1(tmp_path: Path) -> None:
    limits = read(
        tmp_path, "5:cpuacct,cpu:/docker\n4:memory:/user/job\n1:name=systemd:/x", V1,
        **{
            "memory/memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
            "memory/user/memory.limit_in_bytes": f"{GIB}\n",
            "memory/user/memory.usage_in_bytes": f"{GIB // 2}\n",
            "memory/user/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB // 4}\n",
            "memory/user/job/memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
            "cpu,cpuacct/docker/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip
    assert limits.memory_bytes == GIB and limits.free_memory_bytes() == 3 * GIB // 4 and limits.cpu_quota == 2


def test_limits_of_both_versions_count_at_once(tmp_path: Path) -> None:
    mounts = f"{V1}\n40 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    limits = read(
        tmp_path, "4:memory:/a\n0::/b", mounts,
        **{"memory/a/memory.limit_in_bytes": f"{2 * GIB}\n", "unified/b/cpu.max": "100000 100000\n"},
    )  # fmt: skip
    assert limits.memory_bytes == 2 * GIB and limits.cpu_quota == 1


def test_a_container_finds_its_group_below_the_mounted_one_or_at_the_mount(tmp_path: Path) -> None:
    mounted = "33 31 0:31 /docker/ab\\040c /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    for number, group in enumerate(("/docker/ab c", "/docker/ab c/job", "/elsewhere", "/../outside")):
        limits = read(
            tmp_path / str(number), f"4:memory:{group}", mounted,
            **{"memory/memory.limit_in_bytes": f"{GIB}\n", "memory/job/memory.limit_in_bytes": f"{GIB // 2}\n"},
        )  # fmt: skip
        assert limits.memory_bytes == (GIB // 2 if group.endswith("job") else GIB)
    assert next(read_mounts(tmp_path / "0")).root.name == "ab c"


@pytest.mark.usefixtures("cores")
def test_unreadable_files_set_no_limit(tmp_path: Path) -> None:
    for number, files in enumerate(
        ({}, {"cpu.max": "", "memory.max": "unlimited\n"}, {"cpu.max": "0 0", "memory.max": "-1\n"})
    ):
        limits = read(tmp_path / str(number), "0::/\nnonsense", f"{V2}\nnonsense", **files)
        assert (limits.cpu_quota, limits.memory_bytes, limits.num_threads) == (None, None, 8)
        assert limits.free_memory_bytes() == 32 * GIB
    assert read_machine_limits(tmp_path / "missing").free_memory_bytes() > 0


@pytest.fixture
def own_group(request: pytest.FixtureRequest) -> Iterator[dict[str, Path]]:
    """Real groups of this test below those of this process, by controller."""
    made: dict[str, Path] = {}
    for controller in ("cpu", "memory"):
        for group in machine.find_groups(Path("/"), controller):
            directory = group / f"slora-test-{os.getpid()}"
            with suppress(OSError):
                directory.mkdir()
                made[controller] = directory
                break
    yield made
    for directory in made.values():
        directory.rmdir()


REPORT = """
import os, sys
for path in sys.argv[1:]:
    with open(f"{path}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
import torch
from slora.runner.model_part import limit_torch_threads
from slora_kernels.machine_limits import machine_limits
limit_torch_threads()
limits = machine_limits()
print(limits.memory_bytes, limits.free_memory_bytes(), limits.num_threads, torch.get_num_threads())
"""


def test_a_process_in_a_real_group_finds_its_limits(own_group: dict[str, Path]) -> None:
    limits = {"cpu": {"cpu.cfs_quota_us": "100000", "cpu.max": "100000 100000"}}
    limits["memory"] = {"memory.limit_in_bytes": str(GIB), "memory.max": str(GIB)}
    for controller, directory in own_group.items():
        written = [name for name in limits[controller] if (directory / name).exists()]
        if not written:
            pytest.skip(f"{directory} has no {controller} controller")
        (directory / written[0]).write_text(limits[controller][written[0]], encoding="utf-8")
    if len(own_group) < 2:
        pytest.skip("this user cannot create control groups")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", REPORT, *map(str, own_group.values())],
        cwd=ROOT, env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=600, check=False, encoding="utf-8")  # fmt: skip
    assert run.returncode == 0, run.stderr
    limit, free, num_threads, torch_threads = map(int, run.stdout.split())
    assert limit == GIB and GIB // 2 < free < GIB and num_threads == torch_threads == 1
