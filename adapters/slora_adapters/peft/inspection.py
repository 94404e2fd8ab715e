"""Everything that an adapter from outside must pass before anybody relies on it: unpacked, read, checked, weighed.

`inspection_process.py` runs it where nothing that a file does to it can hurt.
"""

from pathlib import Path

from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.adapter import Adapter
from slora_adapters.peft.archive import unpack
from slora_adapters.peft.checked_adapter import CheckedAdapter, summarise
from slora_adapters.peft.number_format import largest_magnitude_bits
from slora_adapters.peft.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.peft.strict_json import parse_object
from slora_kernels.layout import ModelShape

__all__ = ["inspect"]

_MAX_BASE_NAME_CHARS = 256


def inspect(source: Path, scratch: Path, shape: ModelShape, limits: AdapterLimits) -> CheckedAdapter:
    """The adapter in `source`, a PEFT directory or an archive of one.

    scratch: an empty directory for what has to be written; the result may lie there. Raises AdapterInvalid.
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
    """PEFT begins with B all zeros, so an adapter that was saved before it was trained is the base model."""
    factors = ((pair.a.values, pair.b.values) for pair in adapter.pairs.values())
    if all(0 in map(largest_magnitude_bits, pair) for pair in factors):
        message = (
            f"in all {len(adapter.pairs)} modules lora_A or lora_B is zero: the adapter has no effect and would answer "
            "like the base model; save it after training"
        )
        raise AdapterInvalid((Reason("no_effect", message),))


def _read_base_name(directory: Path) -> str | None:
    """What the config calls the base that it was trained on; where that is a path, its last part."""
    raw = (directory / CONFIG_NAME).read_bytes()
    name = parse_object(raw, source=CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES).get("base_model_name_or_path")
    if not isinstance(name, str):
        return None
    return name.rstrip("/").rpartition("/")[2][:_MAX_BASE_NAME_CHARS] or None
