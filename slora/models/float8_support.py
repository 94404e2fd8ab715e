"""Which devices support float8 e4m3, and the errors for devices that do not."""

import torch

from slora.core.errors import ConfigError

__all__ = ["check_float8_kv", "supports_float8"]

# The compute capability of Ada, the first generation of NVIDIA GPUs that supports e4m3.
_MIN_CAPABILITY = (8, 9)


def supports_float8(device: torch.device) -> bool:
    """Whether a GPU can convert e4m3 numbers.

    All AMD GPUs can. If the hardware has another e4m3 format, software converts the numbers.
    """
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def check_float8_kv(device: torch.device) -> None:
    """Raises ConfigError if attention on this GPU can't read KV in fp8. A CPU always can."""
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        raise ConfigError(
            f"kv_cache_dtype is fp8, but {name} is an AMD GPU, whose e4m3 format (up to 240) differs "
            "from the format of the pages (up to 448); set kv_cache_dtype to auto (--kv-cache-dtype "
            "auto)"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype is fp8, but {name} has compute capability {_spell(capability)}, and e4m3 "
            f"needs {_spell(_MIN_CAPABILITY)} or later; set kv_cache_dtype to auto "
            "(--kv-cache-dtype auto)"
        )


def _spell(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
