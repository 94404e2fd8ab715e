"""Runs all checks of an untrusted adapter's files: unpacks, reads, validates and summarises them.

`inspection_process.py` runs them in a process of its own, with limits on memory and CPU time.
"""

from pathlib import Path

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.inspection.archive import unpack
from slora_adapters.inspection.checked_adapter import CheckedAdapter, summarise
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.adapter import Adapter
from slora_adapters.peft.number_format import largest_magnitude_bits
from slora_adapters.peft.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.peft.strict_json import parse_object
from slora_kernels.layout import ModelShape

__all__ = ["inspect"]

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
