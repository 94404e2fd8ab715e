"""The `slora` command line. This module has only names and help texts, so that `slora --help` is fast.

`_HANDLERS` names the module of each subcommand. The module is imported when the subcommand runs.
"""

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from slora.core.engine_config import EngineConfig
from slora.core.setting import SettingSpec, setting_specs
from slora_adapters.process.logs import give_up, open_missing_streams, print_line
from slora_api.core.package_version import find_package_version
from slora_api.core.settings import ClusterSettings, Settings, cluster_setting_specs, server_setting_specs
from slora_kernels.cpu_isa import check_cpu_isa

# Subcommand -> the module and the function that takes the parsed arguments and returns the exit code.
_HANDLERS = {
    "serve": ("slora_api.serve.serve", "main"),
    "demo": ("slora_api.serve.serve", "serve_demo"),
    "doctor": ("slora_api.doctor.doctor", "diagnose"),
    "backup": ("slora_api.operations.backup_command", "backup"),
    "restore": ("slora_api.operations.backup_command", "restore"),
    "tenant create": ("slora_api.tenants.command", "create"),
    "tenant set": ("slora_api.tenants.command", "change"),
    "tenant rename": ("slora_api.tenants.command", "rename"),
    "tenant suspend": ("slora_api.tenants.command", "suspend"),
    "tenant resume": ("slora_api.tenants.command", "resume"),
    "tenant purge": ("slora_api.tenants.command", "purge"),
    "tenant list": ("slora_api.tenants.command", "show"),
    "quota set": ("slora_api.quotas.command", "change"),
    "quota show": ("slora_api.quotas.command", "show"),
    "key create": ("slora_api.keys.command", "create"),
    "key list": ("slora_api.keys.command", "show"),
    "key rotate": ("slora_api.keys.command", "rotate"),
    "key revoke": ("slora_api.keys.command", "revoke"),
    "admin-key create": ("slora_api.keys.command", "create_operator_key"),
    "admin-key list": ("slora_api.keys.command", "show_operator_keys"),
    "admin-key rotate": ("slora_api.keys.command", "rotate"),
    "admin-key revoke": ("slora_api.keys.command", "revoke"),
    "engine list": ("slora_api.operations.command", "show"),
    "engine restart": ("slora_api.operations.command", "restart"),
    "audit log": ("slora_api.operations.command", "log"),
    "adapter push": ("slora_api.adapters.command", "push"),
    "adapter verify": ("slora_api.adapters.verify_command", "verify"),
    "adapter list": ("slora_api.adapters.command", "show"),
    "adapter rm": ("slora_api.adapters.command", "remove"),
    "adapter versions": ("slora_api.adapters.command", "versions"),
    "adapter alias": ("slora_api.adapters.command", "move"),
    "adapter rollback": ("slora_api.adapters.command", "roll_back"),
    "adapter prewarm": ("slora_api.adapters.command", "prewarm"),
    "adapter pin": ("slora_api.adapters.command", "pin"),
    "adapter pins": ("slora_api.adapters.command", "pins"),
    "adapter unpin": ("slora_api.adapters.command", "unpin"),
    "batch submit": ("slora_api.batches.command", "submit"),
    "batch list": ("slora_api.batches.command", "show_all"),
    "batch show": ("slora_api.batches.command", "show"),
    "batch cancel": ("slora_api.batches.command", "cancel"),
    "batch output": ("slora_api.batches.command", "output"),
    "usage": ("slora_api.usage.command", "show"),
    "audit isolation": ("slora_api.operations.isolation.audit", "audit"),
    "complete": ("slora_api.completions.command", "complete"),
    "compare": ("slora_api.completions.command", "compare"),
    "health": ("slora_api.operations.command", "health"),
    "top": ("slora_api.metrics.top_command", "watch"),
    "plan": ("slora_api.cli.plan", "plan"),
    "deploy": ("slora_api.serve.cluster_command", "deploy"),
    "cluster serve": ("slora_api.serve.cluster_command", "serve"),
    "cluster status": ("slora_api.serve.cluster_command", "show"),
    "cluster stop": ("slora_api.serve.cluster_command", "stop"),
}

# Subcommand -> the optional dependencies (extra) that it needs. All other subcommands need `serve`.
_EXTRAS = {
    "adapter verify": "verify",
    **dict.fromkeys(("deploy", "cluster serve", "cluster status", "cluster stop"), "ray"),
}

_VARIABLES = "Each flag is also an environment variable: --max-model-len is SLORA_MAX_MODEL_LEN."
# The settings that the help of a server shows, with texts that fit on a line. `--help-all` shows all, with whole texts.
_USUAL_SETTINGS = {
    "model": "directory of the base model",
    "model_name": "its name for clients",
    "dtype": "auto, float32, bfloat16 or float16",
    "quantization": "weights in 8 bits: auto, int8 or fp8",
    "device": "auto, cpu or cuda",
    "tensor_parallel_size": "GPUs that divide the model",
    "replicas": "engines, each with the whole model",
    "pool_bytes": "memory for KV cache and adapters",
    "kv_cache_dtype": "format of the KV cache: auto or fp8",
    "max_model_len": "most tokens of prompt and answer",
    "max_num_seqs": "most running sequences",
    "max_lora_rank": "highest rank of an adapter",
    "host": "address to listen on",
    "port": "port to listen on",
    "api_workers": "processes that answer HTTP",
    "data_dir": "place of tenants, keys and adapters",
    "store": "adapters elsewhere: redis://, s3://",
    "database": "tenants elsewhere: postgresql://",
    "redis": "warm tier in front of the store",
    "log_format": "text or json",
    "cluster_name": "name of the cluster within Ray",
    "ray_address": "Ray's head: HOST:PORT, or auto",
    "max_replicas": "most engines, if Ray scales them",
}
# Settings by which a command finds a running cluster.
_CLUSTER_PLACE = ("cluster_name", "ray_address", "data_dir")
_QUOTA_HELP = {
    "requests_per_minute": "requests in any 60 seconds",
    "tokens_per_minute": "tokens of prompts and answers in any 60 seconds",
    "tokens_per_day": "tokens of a day (UTC)",
    "tokens_per_month": "tokens of a month (UTC)",
    "concurrent_answers": "answers in progress; each prompt and each choice of a request counts",
    "composed_adapters": "adapters that one request combines",
    "adapter_versions": "versions of adapters; of a tenant only",
    "stored_bytes": "bytes stored for adapters; of a tenant only",
}

_EPILOG = """\
environment:
  SLORA_URL        the server to talk to (default: SLORA_HOST and SLORA_PORT, as for `slora serve`)
  SLORA_ADMIN_KEY  the operator's key, for the commands tenant, key, admin-key, engine, usage, audit and adapter pin
  SLORA_API_KEY    a tenant's key, for the commands adapter, usage, complete and compare
  HF_TOKEN         token of the Hugging Face hub, to push private or gated adapters from the hub

try it:
  slora demo

from an empty server to an answer:
  slora serve --model DIR
  slora tenant create acme
  slora key create acme --adapter shout
  slora adapter verify ./my-adapter --model DIR
  slora adapter push ./my-adapter --name shout
  slora complete "hello there"
"""


class _Commands:
    """Adds subcommands to one parser. Each subcommand stores the name of its handler."""

    def __init__(self, parser: argparse.ArgumentParser, prefix: str = "") -> None:
        self._actions = parser.add_subparsers(metavar="COMMAND", required=True)
        self._prefix = prefix

    def add(self, name: str, help_text: str, *, has_json: bool = False) -> argparse.ArgumentParser:
        parser = self._actions.add_parser(name, help=help_text, description=help_text)
        parser.set_defaults(handler=self._prefix + name, refuse=parser.error)
        if has_json:
            parser.add_argument("--json", action="store_true", help="print JSON for programs")
        return parser

    def group(self, name: str, help_text: str) -> "_Commands":
        return _Commands(self._actions.add_parser(name, help=help_text, description=help_text), name + " ")


def _add_serve(commands: _Commands) -> None:
    serve = commands.add("serve", "run the server")
    demo = commands.add(
        "demo", "run the server with a small trained model and a tenant for each of its adapters"
    )
    doctor = commands.add(
        "doctor", "check this machine and the settings of a server, and say what to do", has_json=True
    )
    demo.add_argument(
        "demo", nargs="?", metavar="DIR", help="another demo: a directory with model/ and adapters/NAME"
    )
    for parser in (serve, demo, doctor):
        parser.epilog = _VARIABLES
        _add_settings(parser, server_setting_specs())
        if parser is doctor:
            parser.epilog += (
                " Give the flags and variables of `slora serve`. The exit code is 1 only if a check fails."
            )


def _add_settings(parser: argparse.ArgumentParser, specs: Sequence[SettingSpec]) -> None:
    for spec in specs:
        text = _USUAL_SETTINGS.get(spec.name, argparse.SUPPRESS)
        if spec.name in _USUAL_SETTINGS and spec.default_text not in ("", "auto"):
            text += f" ({spec.default_text})"
        parser.add_argument(spec.flag, dest=spec.name, metavar=spec.metavar, help=text)
    parser.add_argument(
        "--help-all", nargs=0, action=_HelpAll, specs=specs, help="show all settings, and what they do"
    )


class _HelpAll(argparse.Action):
    """Prints the settings in groups, with their whole texts and defaults, and ends the process."""

    def __init__(self, *, specs: Sequence[SettingSpec], **options: Any) -> None:
        super().__init__(**options)
        self._specs = specs

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        shown = argparse.ArgumentParser(
            prog=parser.prog, usage=f"{parser.prog} [settings]", epilog=_VARIABLES, add_help=False
        )
        groups = {"engine": EngineConfig, "server": Settings, "cluster": ClusterSettings}
        for title, owner in groups.items():
            group, names = shown.add_argument_group(title), {spec.name for spec in setting_specs(owner)}
            for spec in self._specs:
                if spec.name in names:
                    default = f" (default {spec.default_text})" if spec.default_text else ""
                    group.add_argument(spec.flag, metavar=spec.metavar, help=spec.help_text + default)
        shown.print_help()
        parser.exit()


def _add_cluster(commands: _Commands) -> None:
    deploy = commands.add(
        "deploy",
        "start the engines of a cluster through Ray, or change a running cluster to other settings without refusing a "
        "request",
    )
    deploy.add_argument(
        "--local", action="store_true",
        help="start Ray, the engines and an API server on this machine; if they run on --data-dir already, change them",
    )  # fmt: skip
    cluster = commands.group("cluster", "serve, show or end what slora deploy has started")
    serve = cluster.add("serve", "run an API server that uses the engines of a cluster")
    status = cluster.add("status", "show the replicas of a cluster", has_json=True)
    stop = cluster.add("stop", "drain and end all replicas of a cluster")
    for parser in (deploy, serve, status, stop):
        parser.add_argument(
            "file", nargs="?", metavar="FILE", help="cluster file: YAML with settings, which flags override"
        )
        parser.epilog = _VARIABLES
    for parser in (deploy, serve):
        _add_settings(parser, (*cluster_setting_specs(), *server_setting_specs()))
    for parser in (status, stop):
        specs = (*cluster_setting_specs(), *server_setting_specs())
        _add_settings(parser, [spec for spec in specs if spec.name in _CLUSTER_PLACE])


def _add_backup(commands: _Commands) -> None:
    backup = commands.add(
        "backup", "copy database, adapters and pepper into a new directory, while servers keep running"
    )
    backup.epilog = "The directory contains the pepper of all API keys. Keep it as safe as the servers."
    backup.add_argument("directory", metavar="DIR", help="the backup; it must not exist")
    backup.add_argument(
        "--previous",
        metavar="BACKUP",
        help="an earlier backup; weights that it has are linked instead of copied",
    )
    backup.add_argument(
        "--data-dir", metavar="DIR", help="data directory of a server (SLORA_DATA_DIR; default data)"
    )
    backup.add_argument("--database", metavar="URL", help="as in slora serve (SLORA_DATABASE)")
    backup.add_argument("--store", metavar="URL", help="as in slora serve (SLORA_STORE)")
    restore = commands.add("restore", "make a data directory from a backup; it overwrites nothing")
    restore.add_argument("directory", metavar="BACKUP")
    restore.add_argument(
        "--data-dir",
        required=True,
        metavar="DIR",
        help="the data directory to make; if it exists, it must be empty",
    )
    restore.add_argument(
        "--database", metavar="URL", help="an empty PostgreSQL database for tenants, keys and names"
    )
    restore.add_argument("--store", metavar="URL", help="a store for the adapters, as in slora serve")


def _add_tenants_and_keys(commands: _Commands) -> None:
    tenants = commands.group("tenant", "create, change, suspend and list tenants (operator)")
    _add_share(tenants.add("create", "create a tenant"), lambda default: f" (default {default})")
    _add_share(
        tenants.add("set", "change a tenant's share; it applies from the next request", has_json=True),
        lambda _default: "",
    )
    rename = tenants.add("rename", "rename a tenant; its keys, adapters and usage stay")
    rename.add_argument("name")
    rename.add_argument("new_name", metavar="NEW")
    suspend = tenants.add("suspend", "refuse a tenant's requests, and end those in progress")
    suspend.add_argument("name")
    tenants.add("resume", "serve a suspended tenant again").add_argument("name")
    purge = tenants.add(
        "purge", "delete a tenant with its keys, adapters and stored bytes, for ever", has_json=True
    )
    purge.epilog = "Repeat a purge that was interrupted."
    purge.add_argument("name")
    purge.add_argument(
        "--confirm", required=True, metavar="NAME", help="the name again, because a purge cannot be undone"
    )
    purge.add_argument(
        "--ledger", required=True, choices=("keep", "erase"), help="keep or erase what the tenant has used"
    )
    tenants.add("list", "list the tenants with their status and share", has_json=True)

    keys = commands.group("key", "create, rotate, list and revoke API keys (operator)")
    create = keys.add(
        "create", "create an API key for a tenant and print it; it cannot be shown again", has_json=True
    )
    create.add_argument("tenant")
    create.add_argument(
        "--name", metavar="TEXT", help="a label for people, such as the program that gets the key"
    )
    create.add_argument(
        "--adapter", metavar="NAME[@ALIAS]", help="the adapter that this key uses for model=default"
    )
    create.add_argument(
        "--scope", metavar="SCOPE", action="append", dest="scopes",
        help="what the key may do: inference, adapters:read, adapters:write or usage:read; can be given several times "
        "(default: all of them)",
    )  # fmt: skip
    create.add_argument(
        "--model", metavar="NAME[@ALIAS]", action="append", dest="models",
        help="a model that the key may use: an adapter, an alias or the base model; can be given several times "
        "(default: all models of the tenant)",
    )  # fmt: skip
    _add_expiry(create)
    _add_rotate(keys)
    keys.add("list", "list a tenant's keys, without the secrets", has_json=True).add_argument("tenant")
    keys.add("revoke", "revoke a key immediately").add_argument("key_id", help="as in slora_KEYID_..._...")

    operators = commands.group(
        "admin-key", "create, rotate, list and revoke the keys of operators (operator)"
    )
    create = operators.add(
        "create", "create a key for an operator and print it; it cannot be shown again", has_json=True
    )
    create.add_argument("name", help="the person or program that gets the key")
    create.add_argument(
        "--scope", metavar="SCOPE", action="append", dest="scopes",
        help="what the key may do: admin (all that an operator may do) or metrics:read (only GET /metrics) "
        "(default: admin)",
    )  # fmt: skip
    _add_expiry(create)
    _add_rotate(operators)
    operators.add("list", "list the operators' keys, without the secrets", has_json=True)
    operators.add("revoke", "revoke a key immediately").add_argument(
        "key_id", help="as in slora_KEYID_..._..."
    )


def _add_rotate(keys: _Commands) -> None:
    rotate = keys.add(
        "rotate",
        "create a key with the same permissions and limits, and let the old one expire after an overlap",
        has_json=True,
    )
    rotate.add_argument("key_id", help="as in slora_KEYID_..._...")
    rotate.add_argument(
        "--overlap", type=_duration, metavar="TIME", dest="overlap_s",
        help="how long the old key stays valid, at most 30d (default 1d)",
    )  # fmt: skip
    _add_expiry(rotate, "the lifetime of the old key")


def _add_expiry(create: argparse.ArgumentParser, default: str = "until it is revoked") -> None:
    create.add_argument(
        "--expires", type=_duration, metavar="TIME", dest="expires_s",
        help="how long the key is valid: a number and s, m, h or d, such as 30d (default: "
        f"{default})",
    )  # fmt: skip


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration(text: str) -> int:
    """Parses a duration such as 30d and returns seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNIT_SECONDS or not (number.isascii() and number.isdigit()) or not int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; give a number and s, m, h or d, such as 30d"
        )
    return int(number) * _UNIT_SECONDS[unit]


def _add_engines(commands: _Commands) -> None:
    engines = commands.group("engine", "list and restart the engine processes of a server (operator)")
    engines.add("list", "list the engines, whether they serve, and what they compute", has_json=True)
    restart = engines.add(
        "restart", "restart an engine without a refused request, and wait until it serves again"
    )
    restart.epilog = (
        "The engine gets no new requests, and the other engines continue its answers. If no other engine serves, the "
        "restart is refused."
    )
    restart.add_argument("name", nargs="?", metavar="NAME", help="as in `slora engine list`")
    restart.add_argument("--rolling", action="store_true", help="restart all engines, one after the other")
    restart.add_argument(
        "--allow-outage", action="store_true",
        help="restart the engine even if no other engine serves: new requests are refused until it serves again",
    )  # fmt: skip
    restart.add_argument(
        "--timeout", type=_duration, default=1800, metavar="TIME", dest="timeout_s",
        help="how long to wait for each engine: a number and s, m, h or d (default 30m)",
    )  # fmt: skip


def _add_audit(commands: _Commands) -> None:
    audit = commands.group("audit", "show who changed what, and prove that tenants are isolated (operator)")
    log = audit.add("log", "list changes of tenants, keys and adapters, newest first", has_json=True)
    log.add_argument("--tenant", metavar="T", help="only changes of this tenant")
    log.add_argument(
        "--actor", metavar="KEY_ID", help="only changes made with this key; bootstrap is the admin key"
    )
    log.add_argument(
        "--action", metavar="NAME", help="only this action, such as key.revoke, or key for all on keys"
    )
    log.add_argument(
        "--since", type=_time, metavar="TIME", help="only from this time on, such as 2026-11-23T14:00"
    )
    log.add_argument("--until", type=_time, metavar="TIME", help="only before this time")
    log.add_argument(
        "--limit", type=_positive, default=100, metavar="N", help="largest number of entries (default 100)"
    )
    _add_isolation(audit)


def _add_isolation(audit: _Commands) -> None:
    isolation = audit.add(
        "isolation",
        "create two temporary tenants on the running server, and check that neither can see or use what the other has",
        has_json=True,
    )
    isolation.epilog = "The exit code is 0 only if every check passes."


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-11-23T14:00") from None


def _add_quotas(commands: _Commands) -> None:
    quotas = commands.group("quota", "change and show the quotas of tenants and API keys (operator)")
    change = quotas.add(
        "set",
        "change the quota of a tenant or of one of its keys; it applies from the next request",
        has_json=True,
    )
    change.epilog = (
        "The value none removes a limit. A request must fit into the quotas of its tenant and of its key."
    )
    show = quotas.add("show", "show the limits of a tenant or a key, and what is used of them", has_json=True)
    for parser in (change, show):
        parser.add_argument("tenant", nargs="?")
        parser.add_argument("--key", metavar="KEY_ID", help="the quota of this key instead of a tenant's")
    for field, help_text in _QUOTA_HELP.items():
        change.add_argument(f"--{field.replace('_', '-')}", metavar="N", help=help_text)
    change.set_defaults(fields=tuple(_QUOTA_HELP))


def _add_share(tenant: argparse.ArgumentParser, shown: Callable[[int], str]) -> None:
    tenant.add_argument("name")
    tenant.add_argument(
        "--weight",
        type=float,
        metavar="X",
        help="share of the served tokens, relative to other tenants' weights" + shown(1),
    )
    tenant.add_argument(
        "--min-pool-share", type=float, metavar="X",
        help="fraction of the page pool that other tenants cannot take from this tenant once it uses it" + shown(0),
    )  # fmt: skip
    tenant.add_argument(
        "--max-pool-share", type=float, metavar="X",
        help="largest fraction of the page pool that this tenant may hold" + shown(1),
    )  # fmt: skip
    tenant.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="priority class of the tenant; the scheduler serves lower numbers first" + shown(0),
    )


def _add_adapters(commands: _Commands) -> None:
    adapters = commands.group(
        "adapter", "verify, upload, list, roll out and remove LoRA adapters (tenant), pin them (operator)"
    )
    _add_verify(adapters)
    push = adapters.add(
        "push", "upload an adapter as the next version of a name; requests can use it at once", has_json=True
    )
    push.add_argument(
        "source",
        help="where adapter_config.json and adapter_model.safetensors are: a directory; a .zip, .tar or "
        ".tar.gz of a directory; or hf://ORG/REPO[@REVISION][/FOLDER], which is downloaded to this "
        "machine first",
    )
    push.add_argument("--name", help="name of the adapter (default: the name of the source)")
    push.add_argument(
        "--base",
        metavar="DIR",
        help="the base model that the adapter was trained on; the server refuses the upload if it serves "
        "another",
    )
    adapters.add("list", "list your adapters with the version that each name serves", has_json=True)
    remove = adapters.add("rm", "remove a version, or an adapter with all of its versions")
    remove.add_argument("name", metavar="NAME[@N]")
    remove.add_argument("--force", action="store_true", help="remove it even if aliases point at it")
    _add_rollouts(adapters)
    prewarm = adapters.add(
        "prewarm", "load an adapter before its first request, and show where it is", has_json=True
    )
    prewarm.add_argument("name", metavar="NAME[@N|@ALIAS]")
    for name, help_text in (
        ("pin", "keep a tenant's adapter in the page pool (operator)"),
        ("unpin", "allow the page pool to evict a pinned adapter again (operator)"),
    ):
        pin = adapters.add(name, help_text, has_json=True)
        pin.add_argument("name", metavar="NAME[@ALIAS]")
        pin.add_argument("--tenant", required=True, metavar="T", help="the tenant that owns the adapter")
    adapters.add("pins", "list the pins of all tenants (operator)", has_json=True)


def _add_rollouts(adapters: _Commands) -> None:
    adapters.add("versions", "list the versions of an adapter, newest first", has_json=True).add_argument(
        "name"
    )
    alias = adapters.add(
        "alias",
        "point NAME@ALIAS at a version, or split its requests between versions; without versions, "
        "show the alias",
        has_json=True,
    )
    alias.epilog = (
        "`latest` is the alias that the bare name serves. Each push moves it, unless it was set "
        "without --follow."
    )
    alias.add_argument("name")
    alias.add_argument("alias")
    alias.add_argument("versions", nargs="*", metavar="VERSION[=PERCENT]", help="3, or 3=90 4=10")
    alias.add_argument(
        "--expect",
        nargs="*",
        metavar="VERSION[=PERCENT]",
        help="change the alias only if it points at these versions now (none: only if it does not exist)",
    )
    alias.add_argument(
        "--follow", action="store_true", help="each later push moves the alias to the new version"
    )
    alias.add_argument("--delete", action="store_true", help="delete the alias, but not its versions")
    rollback = adapters.add("rollback", "undo the last move of NAME@ALIAS", has_json=True)
    rollback.add_argument("name")
    rollback.add_argument(
        "alias", nargs="?", default="latest", help="default latest, which the bare name serves"
    )


def _add_verify(adapters: _Commands) -> None:
    verify = adapters.add(
        "verify", "compare the answers of slora with those of peft for an adapter; needs no server"
    )
    verify.epilog = (
        "The exit code is 0 if they are equal, 1 if they differ, and 2 if the adapter cannot be served."
    )
    verify.add_argument("directory", help="holds adapter_config.json and adapter_model.safetensors")
    verify.add_argument("--model", metavar="DIR", required=True, help="the base model")
    verify.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="prompt to compare; can be given several times (default: random tokens)",
    )
    verify.add_argument(
        "--max-tokens",
        type=_positive,
        default=16,
        metavar="N",
        help="largest number of tokens of each answer (default 16)",
    )
    verify.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="dtype of both sides (default float32, where a difference is more than rounding)",
    )  # fmt: skip
    verify.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
    verify.add_argument(
        "--max-lora-rank",
        type=_positive,
        default=128,
        metavar="N",
        help="largest rank that the server accepts (default 128)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON for programs")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


def _add_usage(commands: _Commands) -> None:
    usage = commands.add(
        "usage",
        "show what the tenant of SLORA_API_KEY has used, or with SLORA_ADMIN_KEY what all tenants have used",
    )
    usage.add_argument("--tenant", metavar="NAME", help="show this tenant (operator)")
    usage.add_argument("--by", choices=("minute", "hour", "day"), default="day", help="default day")
    usage.add_argument(
        "--since", metavar="TIME",
        help="30m, 24h or 7d ago, a time in ISO 8601, or Unix seconds (default: the last 60 minutes, 24 hours or "
        "7 days)",
    )  # fmt: skip
    usage.add_argument(
        "--until", metavar="TIME", help="end of the time range, in the same forms (default: now)"
    )
    usage.add_argument(
        "--group-by",
        metavar="NAMES",
        help="show a sum for each api_key_id, model or (operator) tenant; give one or more names, separated by commas",
    )
    forms = usage.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON for programs")
    forms.add_argument("--csv", action="store_true", help="print CSV for spreadsheets")


def _add_complete(commands: _Commands) -> None:
    parser = commands.add("complete", "send a chat message and print the answer as it streams")
    parser.add_argument(
        "--model", default="default", help="name of an adapter or of the base model, or default"
    )
    _add_prompt(parser)


def _add_compare(commands: _Commands) -> None:
    parser = commands.add(
        "compare", "send a chat message to several models and print their answers side by side", has_json=True
    )
    # argparse would put the prompt last, where `--models` takes it as a name.
    parser.usage = "slora compare PROMPT --models MODEL [MODEL ...] [options]"
    parser.add_argument(
        "--models",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="names of adapters or of the base model, or default",
    )
    _add_prompt(parser)


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt")
    parser.add_argument(
        "--raw", action="store_true", help="complete the prompt as it is, without a chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="largest number of tokens of the answer (default 256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="sampling temperature; 0 always takes the most probable token",
    )
    parser.add_argument("--seed", type=int, metavar="N")


def _add_health(commands: _Commands) -> None:
    parser = commands.add("health", "check whether the server responds; the exit code is 0 if it does")
    parser.add_argument(
        "--ready", action="store_true", help="check whether the server can serve requests now"
    )


def _add_top(commands: _Commands) -> None:
    parser = commands.add(
        "top",
        "show what a server does at present: with SLORA_ADMIN_KEY all tenants, with SLORA_API_KEY its own tenant",
    )
    parser.epilog = "q or Ctrl-C ends it. Without a terminal, it prints one table, as with --once."
    parser.add_argument("--once", action="store_true", help="print one table after a few seconds")
    parser.add_argument("--json", action="store_true", help="print each frame as a line of JSON")


# Settings of the engine that affect a plan.
_PLANNED_SETTINGS = (
    "dtype", "tensor_parallel_size", "model_impl", "quantization", "kv_cache_dtype", "pool_bytes", "block_tokens",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "swap_bytes",
)  # fmt: skip


def _add_plan(commands: _Commands) -> None:
    parser = commands.add(
        "plan",
        "say how many adapters, requests and tokens per second a device can serve, and which flags to use; needs no "
        "server, no GPU and no weights",
        has_json=True,
    )
    parser.epilog = (
        "Memory is computed as the engine computes it. Times are estimated from the device's data sheet. "
        "The exit code is 0 if the load fits, 1 if it does not, and 2 for values that cannot be planned."
    )
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="directory of the base model; config.json suffices"
    )
    parser.add_argument(
        "--device", metavar="NAME",
        help="L4, A10G, RTX-4090, A100-40, L40S, A100-80, H100, H200 or B200; the next options describe another "
        "device, or change one",
    )  # fmt: skip
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of the device, such as 80GiB")
    parser.add_argument(
        "--bandwidth", metavar="SIZE", help="memory bandwidth in bytes per second, such as 3350GB"
    )
    parser.add_argument(
        "--flops", type=float, metavar="X", help="FLOP/s of dense 16-bit products, such as 989e12"
    )
    parser.add_argument(
        "--host-bandwidth", metavar="SIZE", help="bytes per second from the host, such as 24GB (default 24GB)"
    )
    parser.add_argument(
        "--slice",
        metavar="NAME",
        help="one slice of the device: a MIG profile such as 1g.10gb, or an MPS share such as 50%%",
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare MIG profiles and MPS shares with the whole device"
    )
    parser.add_argument(
        "--adapters", type=int, default=100, metavar="N", help="number of adapters (default 100)"
    )
    parser.add_argument(
        "--rank",
        default="16",
        metavar="R[,R...]",
        help="rank of the adapters, or several in turn (default 16)",
    )
    parser.add_argument(
        "--targets", default="all-linear", metavar="NAMES",
        help="modules that adapters change: all-linear, attention, or names such as q_proj,v_proj (default all-linear)",
    )  # fmt: skip
    parser.add_argument(
        "--popularity", default="zipf:1", metavar="FORM", help="uniform, or zipf:ALPHA (default zipf:1)"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="requests per second (default 1)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="mean length of prompts (default 512)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=256, metavar="N", help="mean length of answers (default 256)"
    )
    for spec in server_setting_specs():
        if spec.name in _PLANNED_SETTINGS:
            parser.add_argument(spec.flag, dest=spec.name, metavar=spec.metavar, help=spec.help_text)
    parser.set_defaults(settings=("model", *_PLANNED_SETTINGS))


def _add_batches(commands: _Commands) -> None:
    batches = commands.group("batch", "compute files of requests in the background (tenant)")
    submit = batches.add(
        "submit", "upload a file with one request in each line and start a batch", has_json=True
    )
    submit.add_argument("file", metavar="FILE")
    submit.add_argument(
        "--endpoint",
        metavar="PATH",
        default="/v1/chat/completions",
        help="the route that answers the requests (default /v1/chat/completions)",
    )
    submit.add_argument("--wait", action="store_true", help="wait until the batch has ended")
    batches.add("list", "list the batches of your tenant, newest first", has_json=True)
    for name, help_text in (
        ("show", "show the state of a batch, and why it failed"),
        ("cancel", "cancel a batch; its answers so far are kept"),
    ):
        batches.add(name, help_text, has_json=True).add_argument("batch", metavar="BATCH_ID")
    output = batches.add("output", "print the answers of a batch, one JSON object in each line")
    output.add_argument("batch", metavar="BATCH_ID")
    output.add_argument("--errors", action="store_true", help="print the lines that failed instead")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands. The command reference in the documentation is also generated from this
    parser.
    """
    parser = argparse.ArgumentParser(
        prog="slora",
        description="Serves thousands of LoRA adapters on one base model, with API keys for each tenant.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slora {find_package_version()}")
    commands = _Commands(parser)
    _add_serve(commands)
    _add_backup(commands)
    _add_tenants_and_keys(commands)
    _add_engines(commands)
    _add_audit(commands)
    _add_quotas(commands)
    _add_adapters(commands)
    _add_batches(commands)
    _add_usage(commands)
    _add_complete(commands)
    _add_compare(commands)
    _add_health(commands)
    _add_top(commands)
    _add_plan(commands)
    _add_cluster(commands)
    return parser


def _load_handler(command: str) -> Callable[[argparse.Namespace], int]:
    """Imports the function of a subcommand. Raises ModuleNotFoundError if one of its optional packages is missing."""
    module, name = _HANDLERS[command]
    # Garbage collection would take a tenth of the import time of `serve`, and would find no garbage.
    gc.disable()
    try:
        handler: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), name)
    finally:
        gc.enable()
    return handler


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code.

    Unless the subcommand's help says otherwise, the code is 0 for success, 1 for an explained failure, and 2 for wrong
    usage.
    """
    open_missing_streams()
    parsed, unknown = make_parser().parse_known_args(arguments)
    if unknown:  # argparse would show the usage of `slora` instead of the subcommand's usage.
        parsed.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        check_cpu_isa()
    except ValueError as error:
        print(f"slora: {error}", file=sys.stderr)
        return 2
    try:
        handler = _load_handler(parsed.handler)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(parsed.handler, "serve")
        remedy = f"pip install 'slora[{extra}]'"
        print(f"slora: `slora {parsed.handler}` needs the package {error.name}: {remedy}", file=sys.stderr)
        return 2
    try:
        code = handler(parsed)
        sys.stdout.flush()
        return code
    except OSError as error:
        # Most often, standard output cannot be written: the disk is full, or the reader, such as `head`, has closed the
        # pipe. Without this, Python would report the error again when it closes standard output.
        give_up(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            print_line(f"slora: {error}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
