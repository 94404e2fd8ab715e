"""The settings of `slora serve`. This module declares the settings of the server, and
`slora.core.engine_config` those of the engine.

The field `max_model_len` becomes the flag `--max-model-len` and the environment variable `SLORA_MAX_MODEL_LEN`. A flag
overrides the environment, which overrides the default. No other module reads these variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slora.core.engine_config import EngineConfig
from slora.core.request import PoolingKind
from slora.core.setting import (
    Auto,
    ByteSize,
    OneOf,
    OnOff,
    Seconds,
    SettingRefused,
    SettingSpec,
    Whole,
    setting,
    setting_specs,
)
from slora_adapters.errors import find_nearest
from slora_adapters.process.logs import LOG_FORMATS
from slora_api.core.server_address import explain_service_links, without_service_links
from slora_kernels.machine_limits import machine_limits


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The smallest number of replicas, `replicas`, is a setting of the server."""

    cluster_name: str = setting("slora", "name of the cluster within Ray", metavar="NAME")
    ray_address: str = setting(
        "auto", "HOST:PORT of Ray's head (its GCS); auto takes the Ray of this host", metavar="ADDRESS"
    )
    secret_file: str = setting(
        "", "file with the secret that connections to engines prove to know; every host with API processes needs the "
        "same file (default: cluster-secret in the data directory)", metavar="PATH",
    )  # fmt: skip
    max_replicas: int | None = setting(
        None, "largest number of replicas, to which Ray scales up under load; replicas is then the smallest number. "
        "auto: replicas is the number", Auto(Whole(1, 1024)), metavar="N",
    )  # fmt: skip
    scale_seconds: float = setting(
        30.0, "how long the load must ask for more replicas before they are started; for fewer replicas, it must ask "
        "20 times as long", Seconds(), metavar="SECONDS",
    )  # fmt: skip
    surge: bool = setting(
        True, "whether an upgrade starts a new replica before it drains an old one, which needs room for one more "
        "replica: on or off", OnOff(),
    )  # fmt: skip


def cluster_setting_specs() -> tuple[SettingSpec, ...]:
    return setting_specs(ClusterSettings)


# `auto`, and the names of the formats in `slora_api.chat.call_format`.
TOOL_CALL_PARSERS = ("auto", "mistral_args", "mistral", "deepseek", "hermes", "phi4", "llama3", "gemma")
_PREFIX = "SLORA_"
# Variables of the client commands, often set in the same shell.
_CLIENT_VARIABLES = frozenset({"SLORA_URL", "SLORA_API_KEY"})
# What to do if there is no base model.
GIVE_MODEL = "give the base model: its directory, or ORG/NAME of the Hugging Face hub"
# With `auto`, the host cache takes this size, or this share of the free RAM if that is less.
AUTO_HOST_CACHE_BYTES = 1 << 30
_HOST_CACHE_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one server. engine: the settings of its engine."""

    engine: EngineConfig
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", metavar="ADDRESS")
    port: int = setting(8000, "TCP port to listen on; 0 takes a free one", Whole(0, 65535), metavar="PORT")
    api_workers: int = setting(
        1, "number of processes that answer HTTP requests. More than one use several cores for tokenizing, JSON and "
        "streaming, and one that dies does not end the streams of the others", Whole(1, 64), metavar="N",
    )  # fmt: skip
    replicas: int = setting(
        1, "number of engine processes. Each has the whole model, its own page pool, and a share of the cores or a GPU "
        "of its own", Whole(1, 64), metavar="N",
    )  # fmt: skip
    data_dir: str = setting(
        "data", "directory for tenants, keys and adapters (created if missing)", metavar="DIR"
    )
    admin_key: str = setting(
        "", "admin key of the operator. Prefer the environment variable, because other users of the "
        "machine can see flags. Without a key, the first start generates one and prints it once", metavar="KEY"
    )  # fmt: skip
    store: str = setting(
        "", "durable store of adapters: a directory; redis://HOST:PORT/DB with append-only file and "
        "noeviction; or s3://BUCKET/FOLDER, gs://, abfs:// and other URLs that fsspec supports "
        "(default: a directory in the data directory)", metavar="URL"
    )  # fmt: skip
    database: str = setting(
        "", "database of tenants, keys and adapter names: postgresql://USER:PASSWORD@HOST/NAME for several hosts, "
        "which then need a --store that all of them can reach. Prefer the environment variable, because other "
        "users of the machine can see flags (default: a SQLite file in the data directory)", metavar="URL"
    )  # fmt: skip
    auth_stale_seconds: float = setting(
        300.0, "how long API keys that the server has seen stay valid while the database is unavailable",
        Seconds(), metavar="SECONDS",
    )  # fmt: skip
    store_environment: str = setting(
        "", "names of additional environment variables that the loader may read, separated by commas, "
        "with * for any text. Some libraries for --store read their credentials from environment "
        "variables (default: none)", metavar="NAMES",
    )  # fmt: skip
    tool_call_parser: str = setting(
        "auto", "format in which the base model writes tool calls; auto recognizes it by the chat template. A template "
        "of an adapter is always recognized first", OneOf(TOOL_CALL_PARSERS), metavar="FORMAT",
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto", "whether answers begin with reasoning between <think> and </think>, which then becomes a field of its "
        "own; auto recognizes it by the chat template", OneOf(("auto", "think", "none")), metavar="FORMAT",
    )  # fmt: skip
    embedding_pooling: str = setting(
        "last", "which hidden states make an embedding if the request does not say: last, that of the last token; "
        "mean, the mean over all tokens", OneOf((PoolingKind.LAST, PoolingKind.MEAN)), metavar="KIND",
    )  # fmt: skip
    lora_root: str = setting(
        "", "directory below which the operator may load adapters with POST /v1/load_lora_adapter (default: none)",
        metavar="DIR",
    )  # fmt: skip
    log_format: str = setting(
        "text", "format of the log on standard error: text, or json with one object for each line", OneOf(LOG_FORMATS),
        metavar="FORMAT",
    )  # fmt: skip
    redis: str = setting("", "redis://HOST:PORT/DB of a warm tier in front of the store", metavar="URL")
    quota_redis: str = setting(
        "", "redis://HOST:PORT/DB of quota counters that several hosts share (default: each host counts for itself)",
        metavar="URL",
    )  # fmt: skip
    host_cache_bytes: int | None = setting(
        None, "memory for packed adapters on the host: auto takes 1 GiB, or an eighth of the free RAM if that is less",
        Auto(ByteSize()), metavar="SIZE",
    )  # fmt: skip
    unknown_fields: str = setting(
        "refuse", "what happens to fields of a request that the server does not know: refuse answers 400 and names the "
        "nearest field; ignore is for gateways that add fields of their own. The header x-slora-ignored of an answer "
        "names the fields that had no effect", OneOf(("refuse", "ignore")), metavar="CHOICE",
    )  # fmt: skip
    max_upload_bytes: int = setting(2**29, "largest adapter upload", ByteSize(), metavar="SIZE")
    max_body_bytes: int = setting(
        2**22, "largest body of a completion or chat request", ByteSize(), metavar="SIZE"
    )
    min_body_bytes_per_s: int = setting(
        2**17, "lowest average rate at which a client may send a body, after a grace period of 20 s", Whole(1),
        metavar="N",
    )  # fmt: skip
    max_connections_per_address: int | None = setting(
        None, "largest number of HTTP connections of one client address; auto is three quarters of all, "
        "which suits a proxy",
        Auto(Whole(1)), metavar="N",
    )  # fmt: skip
    max_concurrent_requests: int = setting(
        512, "largest number of answers in progress or queued", Whole(1), metavar="N"
    )
    max_concurrent_per_tenant: int = setting(
        256, "largest number of answers of one tenant in progress or queued", Whole(1), metavar="N"
    )
    max_adapter_bytes_per_tenant: int = setting(
        2**38,
        "largest number of bytes stored for the adapters of one tenant: weights, chat templates and "
        "generation configs",
        ByteSize(),
        metavar="SIZE",
    )
    max_file_bytes_per_tenant: int = setting(
        2**30, "largest number of bytes of all files of one tenant", ByteSize(1), metavar="SIZE"
    )
    gateway_metrics: bool = setting(
        False, "whether GET /metrics answers without a key, for gateways that cannot send one: on or off. The answer "
        "has only what gateways route by: the load, and the names of the adapters in the pool", OnOff(),
    )  # fmt: skip
    usage_days: int = setting(
        90, "days for which usage is kept by request, minute and hour. The sums of days are kept for ever",
        Whole(32, 36_500), metavar="DAYS",
    )  # fmt: skip
    drain_seconds: float = setting(
        30.0, "how long requests in progress may continue after SIGTERM", Seconds(), metavar="SECONDS"
    )
    stall_seconds: float = setting(
        60.0, "how long the engine or the loader may make no progress while it has work before it is "
        "killed and restarted. /readyz fails after 3 seconds without progress", Seconds(1), metavar="SECONDS",
    )  # fmt: skip
    # The directory of the demo, which only `slora demo` sets: the server makes its tenants, keys and adapters.
    demo: str = ""
    # These limits have no flag, because one value suits every server. Tests take smaller ones.
    max_concurrent_uploads: int = 4
    max_versions_per_tenant: int = 10_000
    max_file_bytes: int = 2**27
    max_files_per_tenant: int = 1000
    max_batches_per_tenant: int = 100
    batch_lines_in_flight: int = 64

    @property
    def max_connections(self) -> int:
        """The largest number of HTTP connections. The limit of open files (ulimit -Hn) may allow fewer."""
        return max(4096, 8 * self.max_concurrent_requests)


def choose_host_cache_bytes(settings: Settings) -> int:
    """The size of the host cache: `host_cache_bytes`, or a share of the free memory."""
    if settings.host_cache_bytes is not None:
        return settings.host_cache_bytes
    return min(AUTO_HOST_CACHE_BYTES, int(machine_limits().free_memory_bytes() * _HOST_CACHE_SHARE))


def server_setting_specs() -> tuple[SettingSpec, ...]:
    """Returns all settings of a server. The settings of the engine come first."""
    return (*setting_specs(EngineConfig), *setting_specs(Settings))


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Maps each variable that looks like a setting, but is not one, to the most similar setting; None if no setting is
    similar.
    """
    specs = (*server_setting_specs(), *cluster_setting_specs())
    known = [spec.variable.removeprefix(_PREFIX) for spec in specs]
    variables = without_service_links(environment)
    named = [name.removeprefix(_PREFIX) for name in variables if name.startswith(_PREFIX)]
    strangers = [name for name in named if name not in known and _PREFIX + name not in _CLIENT_VARIABLES]
    meant = {name: find_nearest(name, known) for name in strangers}
    return {_PREFIX + name: _PREFIX + close if close else None for name, close in meant.items()}


def explain_unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a sentence about each variable that looks like a setting but is not."""
    return explain_service_links(environment) + [
        f"{name} is not a setting{f'; did you mean {meant}?' if meant else ''}"
        for name, meant in unknown_variables(environment).items()
    ]


def read_settings(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Settings:
    """Makes the settings from flags and environment variables.

    flags: field name -> text; None if the flag was not given.

    An empty variable counts as unset, so `SLORA_REDIS=` in a compose file means no Redis. Raises SettingRefused for a
    text that is not a value of its setting, and ConfigError for values that contradict each other.
    """
    environment = without_service_links(environment)
    engine = _read(EngineConfig, flags, environment)
    server = _read(Settings, flags, environment)
    if demo := flags.get("demo"):
        server["demo"] = demo
    if "model" not in engine:
        raise SettingRefused(f"--model (SLORA_MODEL) is missing; {GIVE_MODEL}")
    if server.get("database", "").startswith("postgresql") and not server.get("store"):
        raise SettingRefused(
            "--database (SLORA_DATABASE) is shared by several hosts, but without --store adapters "
            "stay in the data directory of this host; give a --store (SLORA_STORE) that all hosts "
            "can reach, or omit --database"
        )
    return Settings(EngineConfig(**engine), **server)


def _read(owner: type, flags: Mapping[str, str | None], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of one dataclass that a flag or an environment variable sets."""
    values: dict[str, Any] = {}
    for spec in setting_specs(owner):
        if (flag_text := flags.get(spec.name)) is not None:
            values[spec.name] = spec.parse(flag_text, spec.flag)
        elif environment_text := environment.get(spec.variable):
            values[spec.name] = spec.parse(environment_text, spec.variable)
    return values
