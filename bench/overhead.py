"""What the scheduler, the batch and the pool cost by themselves, in CPU time of one thread.

A step's time is that of a steady state: everybody who may run decodes, the others wait for a place. The device and the
sampler are not measured. Two stand-ins are: the source of adapters takes a microsecond of `schedule()`, and the memory
takes as long as that of a device.
"""

import gc
import statistics
import time
from collections.abc import Set
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

from bench.machines import CPU_110M
from bench.simulation.machine import Machine
from bench.simulation.simulation import Setup, Simulation
from bench.simulation.traces import TraceRequest
from bench.table import Row
from slora.engine.process import NEW_OBJECTS
from slora.memory.device_memory import DeviceMemory
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount
from slora.models.step_batch import StepArrays
from slora.scheduler.step_plan import StepPlan
from slora_kernels.batch import TileLimits

NUM_TENANTS = 200
OUTPUT_TOKENS = 4000
RANK = 8


def schedule_row(num_running: int, num_waiting: int, num_used: int, num_known: int, steps: int) -> Row:
    """num_used: adapters that these requests want. num_known: those that were asked for before, once each."""
    batch = _Batch()
    simulation = _busy(num_running, num_waiting, num_used, num_known, batch)
    planned, built, taken_in = [], [], []
    for _ in range(steps):
        assert simulation.step()
        planned.append(simulation.schedule_s)
        built.append(batch.build_s)
        taken_in.append(simulation.postprocess_s)
    assert simulation.scheduler.num_running == num_running, "the state is not steady"
    whole = [sum(parts) for parts in zip(planned, built, taken_in, strict=True)]
    return {
        "running": num_running,
        "waiting": num_waiting,
        "adapters in use": num_used,
        "known": num_known,
        "schedule() median ms": 1e3 * statistics.median(planned),
        "p99 ms": 1e3 * sorted(planned)[int(0.99 * len(planned))],
        "batch median ms": 1e3 * statistics.median(built),
        "postprocess() median ms": 1e3 * statistics.median(taken_in),
        "all median ms": 1e3 * statistics.median(whole),
    }


def schedule_rows(steps: int, *, quick: bool) -> list[Row]:
    """The case that counts; over running requests, over adapters in use, over known adapters."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    rows = [schedule_row(256, 1000, 200, 200, steps)]
    for num_running in (64, 128) if quick else (64, 128, 512):
        rows.append(schedule_row(num_running, 1000, 100, 100, steps))
    for num_used in (10, 100):
        rows.append(schedule_row(256, 1000, num_used, 0, steps))
    for num_known in (10, 1000) if quick else (10, 1_000, 10_000, 100_000):
        rows.append(schedule_row(256, 1000, 10, num_known, steps))
    return rows


def page_rows(repeats: int) -> list[Row]:
    """Taking and giving back pages as growing sequences do (one at a time) and as starting ones do (32 at a time)."""
    rows: list[Row] = []
    for num_pages in (1_000, 100_000):
        for count in (1, 32):
            pool, tenant = PagePool(num_pages), TenantAccount("tenant")
            start = time.perf_counter()
            for _ in range(repeats):
                pool.release(pool.allocate(count, tenant))
            seconds = time.perf_counter() - start
            rows.append({"pool": num_pages, "at a time": count, "us a page": 1e6 * seconds / repeats / count})
    return rows


class _LoadedAdapters:
    """Stands in for `DeviceMemory`: it holds the adapters of a simulation without their bytes."""

    num_state_pages = 0

    def __init__(self, simulation: Simulation) -> None:
        self.geometry = SimpleNamespace(block_tokens=simulation.machine.block_tokens)
        self._loaded = {
            (resident.slot, resident.generation) for resident in simulation.residency if resident.is_loaded
        }

    def holds(self, adapters: Set[tuple[int, int]]) -> bool:
        return self._loaded.issuperset(adapters)


class _Batch:
    """Builds the batch of each step as the runner does on a CPU. build_s: CPU seconds of the last one."""

    def __init__(self) -> None:
        self.build_s = 0.0
        self._last: StepArrays | None = None
        self._memory: DeviceMemory | None = None

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        if plan.loads or plan.rows_to_write or not plan.chunks:
            self._memory = None
            return
        if self._memory is None:
            self._memory = cast(DeviceMemory, _LoadedAdapters(simulation))
        started_s = time.thread_time()
        self._last = StepArrays.build(plan, self._memory, _TILE_LIMITS, last=self._last)
        self._last.upload(torch.device("cpu"))
        self.build_s = time.thread_time() - started_s


# As for Triton's kernels, decode rows and chunks have tiles of their own.
_TILE_LIMITS = TileLimits(64, 16)


def _busy(num_running: int, num_waiting: int, num_used: int, num_known: int, batch: _Batch) -> Simulation:
    """Everybody is there, nobody is in prefill any more."""
    setup = Setup(
        _roomy(num_running),
        (RANK,),
        num_tenants=NUM_TENANTS,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running),
    )
    simulation = Simulation(setup, [batch])
    simulation.run([TraceRequest(0.0, a % NUM_TENANTS, a, 1, 1, a) for a in range(num_known)])
    for index in range(num_running + num_waiting):
        simulation.submit(TraceRequest(0.0, index % NUM_TENANTS, index % num_used, 32, OUTPUT_TOKENS, index))
    while simulation.scheduler.num_running < num_running or not _all_decode(simulation):
        assert simulation.step()
    return simulation


def _all_decode(simulation: Simulation) -> bool:
    return all(sequence.num_generated for sequence in simulation.running.values())


def _roomy(num_running: int) -> Machine:
    """The 110M model with pages enough that nobody gives way."""
    return replace(CPU_110M, name="roomy", pool_tokens=num_running * (OUTPUT_TOKENS + 64) + (1 << 19))
