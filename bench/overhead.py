"""What the scheduler and the pool cost by themselves, in real time on one core.

A step's time is that of `schedule()` in a steady state: everybody who may run decodes, the others wait for a place.
"""

import statistics
import time
from dataclasses import replace

from bench.machines import CPU_110M
from bench.simulation.machine import Machine
from bench.simulation.simulation import Setup, Simulation
from bench.simulation.traces import TraceRequest
from bench.table import Row
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount

NUM_TENANTS = 200
OUTPUT_TOKENS = 4000
RANK = 8


def schedule_row(num_running: int, num_waiting: int, num_used: int, num_known: int, steps: int) -> Row:
    """num_used: adapters that these requests want. num_known: those that were asked for before, once each."""
    simulation = _busy(num_running, num_waiting, num_used, num_known)
    planned, taken_in = [], []
    for _ in range(steps):
        assert simulation.step()
        planned.append(simulation.schedule_s)
        taken_in.append(simulation.postprocess_s)
    assert simulation.scheduler.num_running == num_running, "the state is not steady"
    return {
        "running": num_running,
        "waiting": num_waiting,
        "adapters in use": num_used,
        "known": num_known,
        "schedule() median ms": 1e3 * statistics.median(planned),
        "p99 ms": 1e3 * sorted(planned)[int(0.99 * len(planned))],
        "postprocess() median ms": 1e3 * statistics.median(taken_in),
    }


def schedule_rows(steps: int, *, quick: bool) -> list[Row]:
    """The case that counts; over running requests, over adapters in use, over known adapters."""
    rows = [schedule_row(256, 1000, 100, 100, steps)]
    for num_running in (64, 128) if quick else (64, 128, 512):
        rows.append(schedule_row(num_running, 1000, 100, 100, steps))
    for num_used in (10, 250):
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


def _busy(num_running: int, num_waiting: int, num_used: int, num_known: int) -> Simulation:
    """Everybody is there, nobody is in prefill any more."""
    setup = Setup(
        _roomy(num_running),
        (RANK,),
        num_tenants=NUM_TENANTS,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running),
    )
    simulation = Simulation(setup)
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
