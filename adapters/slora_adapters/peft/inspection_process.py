"""Inspects one adapter in a process of its own: `slora_adapters.peft.inspection_process JSON`, one line of JSON back.

Files that strangers sent are opened here and nowhere before: whatever they make of memory, time or this very
interpreter ends with this process. Limits of the kernel hold for memory and computing time, and it dies with the server
that waits for it, since the next one empties the quarantine. It inherits no secret, writes nowhere but into its scratch
directory, and talks to nobody.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.full_disk import is_full
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.checked_adapter import CheckedAdapter
from slora_adapters.peft.inspection import inspect
from slora_kernels.layout import ModelShape

__all__ = ["InspectionTask", "OutOfMemory", "decode_answer", "main"]

_PR_SET_PDEATHSIG = 1
# Behind whatever serves requests on the same cores.
_NICE = 10


class OutOfMemory(Exception):
    """The inspection wanted more memory than it may have."""


@dataclass(frozen=True, slots=True)
class InspectionTask:
    """What to inspect, and within which bounds. source, scratch, shape, limits: as `inspect` has them.

    memory_bytes: of its own; files that it maps are not counted. cpu_seconds: computing. parent: id of the process that
    waits for it.
    """

    source: Path
    scratch: Path
    shape: ModelShape
    limits: AdapterLimits
    memory_bytes: int
    cpu_seconds: int
    parent: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> "InspectionTask":
        fields = json.loads(text)
        limits = fields["limits"]
        base = limits["base_directory"]
        return InspectionTask(
            **{
                **fields,
                "source": Path(fields["source"]),
                "scratch": Path(fields["scratch"]),
                "shape": ModelShape.from_plain(fields["shape"]),
                "limits": AdapterLimits(**{**limits, "base_directory": base and Path(base)}),
            }
        )


def _bound(task: InspectionTask) -> None:
    """From here on the kernel watches."""
    _die_with(task.parent)
    os.nice(_NICE)
    # What a dead process leaves on the disk is nothing.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first number ends it by SIGXCPU, which has a meaning; the second by SIGKILL, which could be anybody's.
    resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds + 5))
    # Not RLIMIT_AS: it counts the files that are mapped, the base model's among them, which take no memory of ours.
    resource.setrlimit(resource.RLIMIT_DATA, (task.memory_bytes, task.memory_bytes))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we had asked for that
        sys.exit(1)


def _answer(task: InspectionTask) -> dict[str, object]:
    try:
        return {"adapter": asdict(inspect(task.source, task.scratch, task.shape, task.limits))}
    except AdapterInvalid as error:
        return {"reasons": [[reason.code, reason.message] for reason in error.reasons]}
    except MemoryError:
        return {"out_of_memory": True}
    except OSError as error:
        if not is_full(error):
            raise
        return {"errno": error.errno}


def decode_answer(line: bytes) -> CheckedAdapter:
    """What the process found. Raises AdapterInvalid, OutOfMemory or OSError as it says, ValueError for what is no
    answer."""
    answer: Mapping[str, Any] = json.loads(line)
    if "reasons" in answer:
        raise AdapterInvalid(tuple(Reason(*reason) for reason in answer["reasons"]))
    if "out_of_memory" in answer:
        raise OutOfMemory
    if "errno" in answer:
        raise OSError(answer["errno"], "there was no room to unpack it")
    return CheckedAdapter.from_plain(answer["adapter"])


def main() -> None:
    task = InspectionTask.from_json(sys.argv[1])
    _bound(task)
    # All ASCII: a message may quote what no encoder takes.
    sys.stdout.write(json.dumps(_answer(task), default=str) + "\n")


if __name__ == "__main__":
    main()
