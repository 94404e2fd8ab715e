"""Every setting of `slora serve`, once: name, default, meaning, and what is accepted.

A field `max_model_len` is the flag `--max-model-len` and the environment variable `SLORA_MAX_MODEL_LEN`; a flag
wins over the environment, and the environment over the default. The object is made at the edge and passed in; no
other module reads the environment. Knows neither argparse nor what the values do.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

__all__ = [
    "SettingRefused",
    "SettingSpec",
    "Settings",
    "byte_size",
    "read_settings",
    "setting_specs",
    "unknown_variables",
]

# Decimal and binary multiples, as docker and vLLM read them.
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTE_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


_PREFIX = "SLORA_"
# Read by the client commands, and often set in the same shell.
_CLIENT_VARIABLES = frozenset({"SLORA_URL", "SLORA_API_KEY"})
_DEMO_MODEL_NAME = "slora-demo"


class SettingRefused(ValueError):
    """A flag or environment variable whose value cannot be used; the message says what can."""


def byte_size(text: str) -> int:
    """Reads `512MiB`, `2GB` (10**9 bytes each), `1.5GiB` or a plain number of bytes. Raises ValueError."""
    match = _BYTE_SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("a size in bytes such as 512MiB, 2GB or 1048576")
    return math.floor(float(match[1]) * unit)


def _whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    accepted = f"a whole number from {lowest}" + (f" to {highest}" if highest is not None else " up")

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(accepted) from None
        if value < lowest or (highest is not None and value > highest):
            raise ValueError(accepted)
        return value

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError("a number of seconds, 0 or more")
    return value


def _positive_seconds(text: str) -> float:
    try:
        value = _seconds(text)
    except ValueError:
        value = 0.0
    if value < 1:
        raise ValueError("a number of seconds, 1 or more")
    return value


def _choice(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in values:
            raise ValueError("one of " + ", ".join(values))
        return text

    return read


def _or_auto(read: Callable[[str], int]) -> Callable[[str], int | None]:
    def read_or_none(text: str) -> int | None:
        try:
            return None if text == "auto" else read(text)
        except ValueError as error:
            raise ValueError(f"auto, or {error}") from None

    return read_or_none


def _text(text: str) -> str:
    return text


def _setting(
    default: Any, help_text: str, read: Callable[[str], Any] = _text, *, metavar: str = "VALUE"
) -> Any:
    return field(default=default, metadata={"help": help_text, "read": read, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class Settings:
    """What one server runs with. None means: found out at start, from the model or the machine."""

    model: str = _setting(
        "", "directory of the base model (config.json, safetensors, tokenizer)", metavar="DIR"
    )
    model_name: str = _setting(
        "", "what clients call the base model (default: its directory's name)", metavar="NAME"
    )
    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", metavar="ADDRESS")
    port: int = _setting(8000, "TCP port to listen on; 0 takes a free one", _whole(0, 65535), metavar="PORT")
    data_dir: str = _setting(
        "data", "where tenants, keys and adapters are kept (made if missing)", metavar="DIR"
    )
    device: str = _setting("auto", "where the model runs: auto, cpu or cuda", _choice("auto", "cpu", "cuda"))
    dtype: str = _setting(
        "auto",
        "arithmetic of the model: auto, float32, bfloat16 or float16",
        _choice("auto", "float32", "bfloat16", "float16"),
    )
    kernels: str = _setting(
        "auto", "auto, triton, torch or numba", _choice("auto", "triton", "torch", "numba"), metavar="NAME"
    )
    model_impl: str = _setting(
        "auto",
        "whose code computes the model: slora's for the families that it has, or transformers' for any",
        _choice("auto", "slora", "transformers"),
        metavar="NAME",
    )
    quantization: str = _setting(
        "auto", "int8 or fp8 rounds the base model's linears to 8 bits, which halves their memory; auto takes them as "
        "the checkpoint stores them", _choice("auto", "int8", "fp8"), metavar="FORM",
    )  # fmt: skip
    kv_cache_dtype: str = _setting(
        "auto", "what the pool keeps K and V as: auto is the model's dtype; fp8 (e4m3, scaled by token and head) makes "
        "room for nearly twice the tokens; on a GPU from compute capability 8.9 up", _choice("auto", "fp8"),
        metavar="FORM",
    )  # fmt: skip
    admin_key: str = _setting(
        "", "key of the operator; better set in the environment than as a flag, which other users of the machine "
        "can see. Without it one is made and printed once, at the first start", metavar="KEY"
    )  # fmt: skip
    store: str = _setting(
        "", "where adapters are kept durably: a directory; redis://HOST:PORT/DB with append-only file and noeviction; "
        "or s3://BUCKET/FOLDER, gs://, abfs:// and whatever else fsspec has a filesystem for (default: a directory in "
        "the data directory)", metavar="URL"
    )  # fmt: skip
    registry: str = _setting(
        "", "where names of adapters are kept: redis://HOST:PORT/DB with append-only file and noeviction, for several "
        "hosts, which then need a --store that all of them reach (default: the data directory's database)",
        metavar="URL",
    )  # fmt: skip
    store_environment: str = _setting(
        "", "names of further environment variables that the loader may read, separated by commas, with * for any "
        "text; some libraries behind --store take their credentials from such (default: none)", metavar="NAMES",
    )  # fmt: skip
    lora_root: str = _setting(
        "", "directory below which the operator may load adapters with POST /v1/load_lora_adapter (default: none)",
        metavar="DIR",
    )  # fmt: skip
    redis: str = _setting("", "redis://HOST:PORT/DB as a warm tier in front of the store", metavar="URL")
    pool_bytes: int | None = _setting(
        None, "memory for KV cache and adapters: auto takes 0.9 of the free GPU memory, or 25%% of the free RAM",
        _or_auto(byte_size), metavar="SIZE",
    )  # fmt: skip
    block_tokens: int = _setting(16, "tokens of KV cache in one page", _whole(1, 1024), metavar="N")
    max_model_len: int | None = _setting(
        None, "most tokens of prompt and answer together; auto takes the model's own limit", _or_auto(_whole(2)),
        metavar="N",
    )  # fmt: skip
    max_num_seqs: int = _setting(256, "most sequences that run at once", _whole(1), metavar="N")
    max_num_batched_tokens: int | None = _setting(
        None, "most tokens computed in one step", _or_auto(_whole(1)), metavar="N"
    )
    scheduling: str = _setting(
        "fair", "who is served next: fair shares the engine between tenants by weight, fcfs goes by arrival",
        _choice("fair", "fcfs"), metavar="NAME",
    )  # fmt: skip
    prefix_cache: str = _setting(
        "tenant", "whose computed prefixes a request may use: tenant: its own tenant's; public: of the base model, "
        "everybody's, so that a tenant may learn by timing what others asked; off: nobody's",
        _choice("off", "tenant", "public"), metavar="NAME",
    )  # fmt: skip
    eviction: str = _setting(
        "lru", "what leaves the pool first of what nobody runs: cost: what should take least time to bring back, if "
        "it is wanted again at all; lru: what was used longest ago; size: what is largest",
        _choice("cost", "lru", "size"), metavar="NAME",
    )  # fmt: skip
    preemption: str = _setting(
        "auto", "how a sequence gives way when pages are short: swap to the host, recompute later, or auto, whichever "
        "takes less time", _choice("auto", "swap", "recompute"), metavar="NAME",
    )  # fmt: skip
    swap_bytes: int | None = _setting(
        None, "host memory for sequences that gave way: auto takes a quarter of the pool's size, 0 is none",
        _or_auto(byte_size), metavar="SIZE",
    )  # fmt: skip
    load_bytes_per_step: int | None = _setting(
        None, "most adapter bytes copied into the pool beside one step: auto lets steps grow by a tenth, and by more "
        "while many wait for adapters", _or_auto(byte_size), metavar="SIZE",
    )  # fmt: skip
    cuda_graphs: str = _setting(
        "on", "on a GPU, whether decode steps are recorded once and replayed: on or off", _choice("on", "off")
    )
    max_lora_rank: int = _setting(128, "highest rank of an adapter that is accepted", _whole(1), metavar="N")
    host_cache_bytes: int = _setting(
        2**30, "memory for packed adapters on the host", byte_size, metavar="SIZE"
    )
    max_upload_bytes: int = _setting(2**29, "largest adapter upload", byte_size, metavar="SIZE")
    max_body_bytes: int = _setting(2**22, "largest body of any other request", byte_size, metavar="SIZE")
    min_body_bytes_per_s: int = _setting(
        2**17, "slowest average rate at which a client may send a body, with 20 s of patience", _whole(1), metavar="N"
    )  # fmt: skip
    max_connections: int = _setting(
        4096, "most HTTP connections at once; fewer where the limit of open files (ulimit -Hn) does not allow them",
        _whole(1), metavar="N",
    )  # fmt: skip
    max_connections_per_address: int | None = _setting(
        None, "most HTTP connections of one client address: auto is three quarters of all, which suits a proxy",
        _or_auto(_whole(1)), metavar="N",
    )  # fmt: skip
    max_concurrent_requests: int = _setting(
        512, "most generations in progress or queued", _whole(1), metavar="N"
    )
    max_concurrent_per_tenant: int = _setting(256, "the same for one tenant", _whole(1), metavar="N")
    max_concurrent_uploads: int = _setting(4, "most adapter uploads at once", _whole(1), metavar="N")
    max_versions_per_tenant: int = _setting(
        10_000, "most versions of adapters that one tenant keeps", _whole(1), metavar="N"
    )
    max_adapter_bytes_per_tenant: int = _setting(
        2**38,
        "most bytes stored for the adapters of one tenant: weights, chat templates and generation configs",
        byte_size,
        metavar="SIZE",
    )
    drain_seconds: float = _setting(
        30.0, "how long requests in progress may take to finish after SIGTERM", _seconds, metavar="SECONDS"
    )
    stall_seconds: float = _setting(
        60.0, "how long the engine or the loader may make no progress while it has work; then it is killed and started "
        "again. /readyz fails after 3 seconds without progress", _positive_seconds, metavar="SECONDS",
    )  # fmt: skip
    demo: str = _setting(
        "", "demo mode: tenants, keys and adapters from DIR (holding model/ and adapters/)", metavar="DIR"
    )


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting as the command line and the environment see it."""

    name: str
    help_text: str
    metavar: str
    default: Any
    read: Callable[[str], Any]

    @property
    def default_text(self) -> str:
        """The default as somebody would type it; empty when there is none."""
        if self.default is None:
            return "auto"
        whole = {suffix: size for suffix, size in (("GiB", 2**30), ("MiB", 2**20)) if self.read is byte_size}
        unit = next((suffix for suffix, size in whole.items() if self.default % size == 0), "")
        return f"{self.default // whole[unit]}{unit}" if unit else str(self.default)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()

    def parse(self, text: str, source: str) -> Any:
        """Reads `text`, which came from `source` (a flag or a variable). Raises SettingRefused."""
        try:
            return self.read(text)
        except ValueError as error:
            raise SettingRefused(f"{source} is {text!r}; it must be {error}") from None


def setting_specs() -> tuple[SettingSpec, ...]:
    """All settings, in the order of the dataclass."""
    return tuple(
        SettingSpec(f.name, f.metadata["help"], f.metadata["metavar"], f.default, f.metadata["read"])
        for f in fields(Settings)
    )


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that look like settings and are none, each with the one that it was probably meant to be."""
    known = [spec.variable.removeprefix(_PREFIX) for spec in setting_specs()]
    named = [name.removeprefix(_PREFIX) for name in environment if name.startswith(_PREFIX)]
    strangers = [name for name in named if name not in known and _PREFIX + name not in _CLIENT_VARIABLES]
    meant = {name: get_close_matches(name, known, 1) for name in strangers}
    return {_PREFIX + name: _PREFIX + close[0] if close else None for name, close in meant.items()}


def read_settings(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Settings:
    """Makes the settings from flags (by field name; None: not given) and environment. Raises SettingRefused.

    An empty variable counts as unset, so that `SLORA_REDIS=` in a compose file means no Redis.
    """
    values: dict[str, Any] = {}
    for spec in setting_specs():
        if (flag_text := flags.get(spec.name)) is not None:
            values[spec.name] = spec.parse(flag_text, spec.flag)
        elif environment_text := environment.get(spec.variable):
            values[spec.name] = spec.parse(environment_text, spec.variable)
    if demo := values.get("demo"):
        values = {"model": f"{demo}/model", "model_name": _DEMO_MODEL_NAME, **values}
    if not values.get("model"):
        raise SettingRefused("--model (SLORA_MODEL) is missing; give the directory of the base model")
    if values.get("registry") and not values.get("store"):
        raise SettingRefused(
            "--registry (SLORA_REGISTRY) is shared by several hosts, but adapters would be kept in this one's data "
            "directory; give a --store (SLORA_STORE) that all of them reach, or leave --registry out"
        )
    return Settings(**values)
