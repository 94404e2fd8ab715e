"""The `slora` command line: the names of its commands, so that `slora --help` is fast.

A command's arguments stand beside the function that runs it (`declaration.py`). Its module is imported only when the
command is used.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from slora_adapters.process.logs import give_up, open_missing_streams, print_line
from slora_api.cli.declaration import explain_missing_package, load_commands
from slora_api.core.package_version import find_package_version
from slora_kernels.cpu_isa import check_cpu_isa


class _TopCommand(NamedTuple):
    """A command, or a group of commands. extra: the optional dependencies that it needs."""

    help_text: str
    modules: tuple[str, ...]
    is_group: bool = False
    extra: str = "serve"


def _command(help_text: str, module: str, extra: str = "serve") -> _TopCommand:
    return _TopCommand(help_text, (f"slora_api.{module}",), extra=extra)


def _group(help_text: str, *modules: str, extra: str = "serve") -> _TopCommand:
    return _TopCommand(
        help_text, tuple(f"slora_api.{module}" for module in modules), is_group=True, extra=extra
    )


_TOP_COMMANDS = {
    "serve": _command("run the server", "serve.serve"),
    "demo": _command(
        "run the server with a small trained model and a tenant for each of its adapters", "serve.serve"
    ),
    "doctor": _command(
        "check this machine and the settings of a server, and say what to do", "doctor.doctor"
    ),
    "backup": _command(
        "copy database, adapters and pepper into a new directory, while servers keep running",
        "operations.backup_command",
    ),
    "restore": _command(
        "make a data directory from a backup; it overwrites nothing", "operations.backup_command"
    ),
    "tenant": _group("create, change, suspend and list tenants (operator)", "tenants.command"),
    "key": _group("create, rotate, list and revoke API keys (operator)", "keys.command"),
    "admin-key": _group("create, rotate, list and revoke the keys of operators (operator)", "keys.command"),
    "engine": _group("list and restart the engine processes of a server (operator)", "operations.command"),
    "audit": _group(
        "show who changed what, and prove that tenants are isolated (operator)",
        "operations.command",
        "operations.isolation.audit",
    ),
    "quota": _group("change and show the quotas of tenants and API keys (operator)", "quotas.command"),
    "adapter": _group(
        "verify, upload, list, roll out and remove LoRA adapters (tenant), pin them (operator)",
        "adapters.command",
    ),
    "batch": _group("compute files of requests in the background (tenant)", "batches.command"),
    "usage": _command(
        "show what the tenant of SLORA_API_KEY has used, or with SLORA_ADMIN_KEY what all tenants have used",
        "usage.command",
    ),
    "complete": _command("send a chat message and print the answer as it streams", "completions.command"),
    "compare": _command(
        "send a chat message to several models and print their answers side by side", "completions.command"
    ),
    "health": _command(
        "check whether the server responds; the exit code is 0 if it does", "operations.command"
    ),
    "top": _command(
        "show what a server does at present: with SLORA_ADMIN_KEY all tenants, with SLORA_API_KEY its own tenant",
        "metrics.top_command",
    ),
    "plan": _command(
        "say how many adapters, requests and tokens per second a device can serve, and which flags to use; needs no "
        "server, no GPU and no weights",
        "cli.plan",
    ),
    "deploy": _command(
        "start the engines of a cluster through Ray, or change a running cluster to other settings without refusing a "
        "request",
        "serve.cluster_command",
        extra="ray",
    ),
    "cluster": _group(
        "serve, show or end what slora deploy has started", "serve.cluster_command", extra="ray"
    ),
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


def make_parser(name: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command line. The command reference in the documentation is also generated from it.

    name: the command or group of which the arguments are needed; None: those of all.

    Raises ModuleNotFoundError if an optional package of the command is missing.
    """
    parser = argparse.ArgumentParser(
        prog="slora",
        description="Serves thousands of LoRA adapters on one base model, with API keys for each tenant.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slora {find_package_version()}")
    actions = parser.add_subparsers(metavar="COMMAND", required=True)
    for known, entry in _TOP_COMMANDS.items():
        added = actions.add_parser(known, help=entry.help_text, description=entry.help_text)
        if name in (None, known):
            _declare(added, known, entry)
    return parser


def _declare(parser: argparse.ArgumentParser, name: str, entry: _TopCommand) -> None:
    found = {command.name: command for module in entry.modules for command in load_commands(module)}
    if not entry.is_group:
        found[name].declare(parser)
        return
    actions = parser.add_subparsers(metavar="COMMAND", required=True)
    for full_name, command in found.items():
        group, _, own_name = full_name.partition(" ")
        if group == name:
            command.declare(
                actions.add_parser(own_name, help=command.help_text, description=command.help_text)
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code.

    Unless the subcommand's help says otherwise, the code is 0 for success, 1 for an explained failure, and 2 for wrong
    usage.
    """
    open_missing_streams()
    given = sys.argv[1:] if arguments is None else arguments
    words = [word for word in given if not word.startswith("-")]
    name = words[0] if words else ""
    try:
        parser = make_parser(name)
    except ModuleNotFoundError as error:
        entry = _TOP_COMMANDS[name]
        return explain_missing_package(" ".join(words[: 1 + entry.is_group]), error, entry.extra)
    parsed, unknown = parser.parse_known_args(given)
    if unknown:  # argparse would show the usage of `slora` instead of the subcommand's usage.
        parsed.refuse_unknown(unknown)
    try:
        check_cpu_isa()
    except ValueError as error:
        print(f"slora: {error}", file=sys.stderr)
        return 2
    try:
        code: int = parsed.handler(parsed)
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
