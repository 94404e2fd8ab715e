"""Inspects one adapter in its own process: `slora_adapters.inspection.inspection_process JSON` prints a line of JSON.

This process is the first to open untrusted files. So if they exhaust memory, take endless time or crash the
interpreter, only this process ends. The kernel limits its memory and CPU time. The process is killed when its server
dies. Otherwise it would still read uploaded files while the next server deletes them. The process inherits no secret,
writes only to its scratch directory, and opens no connection.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.inspection.archive import unpack
from slora_adapters.peft.adapter import Adapter, AdapterLimits, CheckedAdapter, summarise
from slora_adapters.peft.pattern_process import die_with
from slora_adapters.peft.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.peft.strict_json import parse_object
from slora_adapters.peft.tensor_file import largest_magnitude_bits
from slora_adapters.process.full_disk import is_full
from slora_kernels.layout import ModelShape

_MAX_BASE_NAME_CHARS = 256


def inspect(source: Path, scratch: Path, shape: ModelShape, limits: AdapterLimits) -> CheckedAdapter:
    """Checks and summarises the adapter in `source`, a PEFT directory or an archive of one.

    scratch: an empty directory for all output; the result may refer to files in it. Raises AdapterInvalid.
    """
    directory = source
    if source.is_file():
        directory = scratch / "unpacked"
        directory.mkdir()
        unpack(source, directory, limits.max_tensor_bytes)
    adapter = read_adapter(directory, shape, limits)
    _refuse_without_effect(adapter)
    return summarise(adapter, directory, scratch, shape, _read_base_name(directory))


def _refuse_without_effect(adapter: Adapter) -> None:
    """Refuses an adapter in which every module has a zero factor. PEFT initialises B with zeros, so this happens when
    an adapter is saved before training.
    """
    factors = ((pair.a.values, pair.b.values) for pair in adapter.pairs.values())
    if all(0 in map(largest_magnitude_bits, pair) for pair in factors):
        message = (
            f"lora_A or lora_B is zero in each of the {len(adapter.pairs)} modules: the adapter has "
            "no effect and would answer like the base model; save it after training"
        )
        raise AdapterInvalid((Reason("no_effect", message),))


def _read_base_name(directory: Path) -> str | None:
    """Returns the name of the base model in the config, or only its last part if the name is a path."""
    raw = (directory / CONFIG_NAME).read_bytes()
    name = parse_object(raw, source=CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES).get("base_model_name_or_path")
    if not isinstance(name, str):
        return None
    return name.rstrip("/").rpartition("/")[2][:_MAX_BASE_NAME_CHARS] or None


# A nice value that gives priority to the processes that serve requests on the same cores.
_NICE = 10


class OutOfMemory(Exception):
    """The inspection exceeded its memory limit."""


@dataclass(frozen=True, slots=True)
class InspectionTask:
    """The arguments of `inspect`, and the limits of the process."""

    source: Path
    scratch: Path
    shape: ModelShape
    limits: AdapterLimits
    memory_bytes: int  # limit on private memory; mapped files are not counted
    cpu_seconds: int  # limit on CPU time
    parent: int  # id of the process that waits for the answer

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
                "limits": AdapterLimits(
                    **{
                        **limits,
                        "base_directory": base and Path(base),
                        "tokenizer_digests": tuple(limits["tokenizer_digests"]),
                    }
                ),
            }
        )


def _bound(task: InspectionTask) -> None:
    """Sets the kernel's limits on this process."""
    die_with(task.parent)
    os.nice(_NICE)
    # A core file could fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The soft limit sends SIGXCPU, which the server recognises. The hard limit sends SIGKILL, which can also have other
    # causes.
    resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds + 5))
    # RLIMIT_AS would also count mapped files, such as the files of the base model.
    resource.setrlimit(resource.RLIMIT_DATA, (task.memory_bytes, task.memory_bytes))


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
    """Decodes the answer of an inspection process and returns the adapter. Raises the error that the answer reports:
    AdapterInvalid, OutOfMemory or OSError. Raises ValueError if the line is not an answer.
    """
    answer: Mapping[str, Any] = json.loads(line)
    if "reasons" in answer:
        raise AdapterInvalid(tuple(Reason(*reason) for reason in answer["reasons"]))
    if "out_of_memory" in answer:
        raise OutOfMemory
    if "errno" in answer:
        raise OSError(answer["errno"], "there was no space to unpack the archive")
    return CheckedAdapter.from_plain(answer["adapter"])


def main() -> None:
    task = InspectionTask.from_json(sys.argv[1])
    _bound(task)
    # `json.dumps` escapes everything except ASCII. A message may quote lone surrogates, which UTF-8 cannot encode.
    sys.stdout.write(json.dumps(_answer(task), default=str) + "\n")


if __name__ == "__main__":
    main()
