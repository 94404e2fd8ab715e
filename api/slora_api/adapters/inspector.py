"""Runs the inspection of each upload in a process of its own and reports the outcome.

If the process crashes, hangs or exceeds a limit, only its upload is refused, with the reason. All tenants share a few
such processes in fair order. An upload that is cancelled while it waits is never inspected.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.inspection.inspection_process import InspectionTask, OutOfMemory, decode_answer
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.checked_adapter import CheckedAdapter
from slora_adapters.process.children import BASE_VARIABLES, pass_on
from slora_api.core.errors import InspectionFailed
from slora_api.core.fair_slots import FairSlots, slots_of_process
from slora_kernels.layout import ModelShape

# One thread per inspection, because the other cores serve requests.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# The largest valid answer has a config of 1 MiB and two texts of 256 KiB. Each of these bytes may take six bytes of
# JSON.
_MAX_ANSWER_BYTES = 16 << 20
# Two inspectors are reserved for tenants without an inspector, so that two tenants never hold all inspectors.
_NUM_INSPECTORS, _NUM_RESERVED = 4, 2
# `RequestLimiter` refuses a tenant's uploads before this limit is reached.
_MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class InspectionBounds:
    """The limits of one inspection: private memory, and CPU time that grows with the size of the upload.

    To end a process that hangs, the wall-clock time is limited to `wall_time_factor` times the CPU time. The factor is
    large, because an inspection of one CPU second can take minutes on a busy machine.

    Worked example: an upload of 80 MiB may use 5 + 10 s of CPU time; reading and checking it takes about one second.
    """

    memory_bytes: int = 512 << 20
    cpu_seconds: int = 5
    bytes_per_cpu_second: int = 8 << 20
    wall_time_factor: float = 120.0

    def cpu_seconds_for(self, source: Path) -> int:
        files = source.iterdir() if source.is_dir() else [source]
        return self.cpu_seconds + sum(file.stat().st_size for file in files) // self.bytes_per_cpu_second


class Inspector:
    """Inspects adapters for a base model of `shape` within `limits`. num_processes: number of API processes of the
    host, which share the inspectors.
    """

    def __init__(
        self, shape: ModelShape, limits: AdapterLimits, bounds: InspectionBounds, num_processes: int = 1
    ) -> None:
        self._shape = shape
        self._limits = limits
        self._bounds = bounds
        num_inspectors = slots_of_process(_NUM_INSPECTORS, _NUM_RESERVED, num_processes)
        self._slots = FairSlots(
            num_inspectors, _MAX_WAITING, "uploads to inspect", num_reserved=_NUM_RESERVED
        )

    async def inspect(self, tenant: str, source: Path, scratch: Path) -> CheckedAdapter:
        """Inspects the adapter in `source`, which is a PEFT directory or an archive of one. Writes only to the empty
        folder `scratch`. The adapter's tensor file may be there afterwards.

        Raises AdapterInvalid with every reason, InspectionFailed, DiskFull, or TenantBusy.
        """
        async with self._slots.hold(tenant):
            return await self._inspect(source, scratch)

    async def _inspect(self, source: Path, scratch: Path) -> CheckedAdapter:
        bounds = self._bounds
        cpu_seconds = bounds.cpu_seconds_for(source)
        wall_seconds = bounds.wall_time_factor * cpu_seconds
        task = InspectionTask(
            source,
            scratch,
            self._shape,
            self._limits,
            bounds.memory_bytes,
            cpu_seconds,
            parent=os.getpid(),
        )
        process = await _start(task)
        try:
            async with asyncio.timeout(wall_seconds):
                line = await _read_line(process)
                exit_code = await process.wait()
        except TimeoutError:
            raise InspectionFailed(
                f"The check of the adapter did not finish within {wall_seconds:g} s, because the "
                "server is too busy. Try again."
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if exit_code == -signal.SIGXCPU:
            raise _over_limit(f"over {cpu_seconds} s of CPU time")
        try:
            return decode_answer(line)
        except OutOfMemory:
            raise _over_limit(f"over {bounds.memory_bytes} bytes of memory") from None
        except ValueError:
            raise InspectionFailed(
                f"The process that checked the adapter ended with {_describe(exit_code)} before it "
                "had a result. The server's log has the reason."
            ) from None


async def _start(task: InspectionTask) -> Process:
    arguments = ("-P", "-m", "slora_adapters.inspection.inspection_process", task.to_json())
    environment = pass_on(os.environ, BASE_VARIABLES) | _ENVIRONMENT
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=DEVNULL, stdout=PIPE, limit=_MAX_ANSWER_BYTES, env=environment
    )


async def _read_line(process: Process) -> bytes:
    """Returns the process's answer; empty if it is longer than any valid answer."""
    assert process.stdout is not None
    try:
        return await process.stdout.readline()
    except ValueError:
        return b""


def _over_limit(what: str) -> AdapterInvalid:
    message = (
        f"the check of the adapter takes {what}, which is more than any valid adapter of this size needs"
    )
    return AdapterInvalid((Reason("inspection_limit", message),))


def _describe(exit_code: int) -> str:
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
