"""How a module declares its subcommands: names, arguments and help texts stand beside the functions that run them.

@command("tenant rename", "rename a tenant", argument("name"), argument("new_name", metavar="NEW"))
def rename(arguments: argparse.Namespace) -> int: ...
"""

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slora.core.engine_config import EngineConfig
from slora.core.setting import SettingSpec, setting_specs
from slora_adapters.errors import find_nearest
from slora_api.core.settings import ClusterSettings, Settings

# Runs a subcommand and returns the exit code.
Handler = Callable[[argparse.Namespace], int]
# Adds arguments to the parser of a subcommand.
Declare = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class DeclaredCommand:
    """help_text: None for a command that is not in a group; `main.py` has its text. usage: None for argparse's."""

    name: str
    help_text: str | None
    arguments: Sequence[Declare]
    handler: Handler
    epilog: str | None
    usage: str | None

    def declare(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(
            handler=self.handler, refuse=parser.error, refuse_unknown=partial(_refuse_unknown, parser)
        )
        parser.epilog, parser.usage = self.epilog, self.usage
        for declare in self.arguments:
            declare(parser)


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exits with the usage of the subcommand and its flags that the unknown ones were probably meant to be."""
    known = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    meant = [f"--{nearest}" for flag in flags if (nearest := find_nearest(flag, known))]
    hint = f"; did you mean {' '.join(meant)}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


# Module -> its commands, in the order of their declarations.
_declared: dict[str, list[DeclaredCommand]] = {}


def command(
    name: str,
    help_text: str | None,
    *arguments: Declare,
    epilog: str | None = None,
    usage: str | None = None,
    has_json: bool = False,
) -> Callable[[Handler], Handler]:
    """Declares that the decorated function runs the subcommand `name`, such as "tenant rename"."""

    def declare(handler: Handler) -> Handler:
        options = (JSON, *arguments) if has_json else arguments
        found = DeclaredCommand(name, help_text, options, handler, epilog, usage)
        _declared.setdefault(handler.__module__, []).append(found)
        return handler

    return declare


def argument(*names: str, **options: Any) -> Declare:
    """See `ArgumentParser.add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


JSON = argument("--json", action="store_true", help="print JSON for programs")


def one_of(*arguments: Declare) -> Declare:
    """Arguments of which the user may give only one."""

    def declare(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for add in arguments:
            add(group)

    return declare


def load_commands(module: str) -> Sequence[DeclaredCommand]:
    """Imports a module and returns its commands. Raises ModuleNotFoundError if an optional package is missing."""
    # Garbage collection would take a tenth of the import time of `serve`, and would find no garbage.
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        gc.enable()
    return _declared[module]


def run_later(module: str, function: str, arguments: argparse.Namespace, name: str, extra: str) -> int:
    """Imports a module that needs the packages of `extra`, and runs its function. name: of the command."""
    try:
        handler: Handler = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        return explain_missing_package(name, error, extra)
    return handler(arguments)


def explain_missing_package(name: str, error: ModuleNotFoundError, extra: str) -> int:
    """Prints what to install for a command. Returns the exit code."""
    remedy = f"pip install 'slora[{extra}]'"
    print(f"slora: `slora {name}` needs the package {error.name}: {remedy}", file=sys.stderr)
    return 2


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def read_duration(text: str) -> int:
    """Parses a duration such as 30d and returns seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNIT_SECONDS or not (number.isascii() and number.isdigit()) or not int(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; give a number and s, m, h or d, such as 30d"
        )
    return int(number) * _UNIT_SECONDS[unit]


def read_positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


VARIABLES = "Each flag is also an environment variable: --max-model-len is SLORA_MAX_MODEL_LEN."
# The settings that the help of a server shows, with texts that fit on a line. `--help-all` shows all, with whole texts.
_USUAL_SETTINGS = {
    "model": "directory of the base model",
    "model_name": "its name for clients",
    "dtype": "auto, float32, bfloat16 or float16",
    "quantization": "weights in 8 or 4 bits: auto, int8, fp8 or int4",
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


def setting_flags(specs: Sequence[SettingSpec]) -> Declare:
    """The flags of settings, and `--help-all`."""

    def declare(parser: argparse.ArgumentParser) -> None:
        for spec in specs:
            text = _USUAL_SETTINGS.get(spec.name, argparse.SUPPRESS)
            if spec.name in _USUAL_SETTINGS and spec.default_text not in ("", "auto"):
                text += f" ({spec.default_text})"
            parser.add_argument(spec.flag, dest=spec.name, metavar=spec.metavar, help=text)
        parser.add_argument(
            "--help-all", nargs=0, action=_HelpAll, specs=specs, help="show all settings, and what they do"
        )

    return declare


class _HelpAll(argparse.Action):
    """Prints the settings in groups, with their whole texts and defaults, and ends the process."""

    def __init__(self, *, specs: Sequence[SettingSpec], **options: Any) -> None:
        super().__init__(**options)
        self._specs = specs

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        shown = argparse.ArgumentParser(
            prog=parser.prog, usage=f"{parser.prog} [settings]", epilog=VARIABLES, add_help=False
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
