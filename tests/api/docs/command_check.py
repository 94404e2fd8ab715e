"""What is checked of a documented command without running it, and which commands the tests run."""

import argparse
import contextlib
import importlib.util
import io
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import yaml

from bench.gpu.all import make_parser as make_gpu_parser
from slora_api.cli.main import make_parser
from slora_api.core.settings import read_settings, server_setting_specs
from tests.api.docs.code_block import ROOT

__all__ = ["find_fault", "find_flags", "is_run"]

# Subcommands that are not run against the server of the test, because they are a server, run until a key is pressed,
# need what no test machine has, or have a test of their own in tests/api/cli.
_NOT_RUN = frozenset({"serve", "demo", "top", "doctor", "plan", "deploy", "cluster"})
_LONG_FLAGS = frozenset({"--timing"})
_all_commands = cache(make_parser)
_SETTING_NAMES = frozenset(spec.name for spec in server_setting_specs())


def is_run(words: Sequence[str]) -> bool:
    """Whether the soak run executes this command. Every other command is only checked by `find_fault`, such as one with
    the address of a database that the reader has to fill in.
    """
    match words:
        case ["slora", subcommand, *rest]:
            is_long = not _LONG_FLAGS.isdisjoint(rest)
            return subcommand not in _NOT_RUN and not is_long and not any("HOST/" in word for word in rest)
        case ["python", script, *_]:
            # tests/clients runs the other program, which needs Milvus.
            return script.endswith(".py") and script != "demo/rag.py"
    return words[0] in ("curl", "export")


def find_fault(words: Sequence[str]) -> str | None:
    """What is wrong with a simple command, as far as can be told without running it. None: nothing."""
    check = _CHECKS.get(words[0])
    if check is None:
        return f"the program {words[0]!r} is not known: add it to tests/api/docs/command_check.py"
    return check(words[1:])


def _check_slora(arguments: Sequence[str]) -> str | None:
    fault, parsed = _parse(_all_commands(), arguments)
    if fault is not None:
        return fault
    if arguments[0] in ("serve", "demo"):
        flags = {name: value for name, value in vars(parsed).items() if name in _SETTING_NAMES}
        read_settings({"model": "DIR"} | flags, {})
    return None


def _parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[str | None, argparse.Namespace]:
    """Returns what is wrong with the arguments of a command, and their values."""
    message, parsed = io.StringIO(), argparse.Namespace()
    try:
        with contextlib.redirect_stderr(message):
            parsed, unknown = parser.parse_known_args(arguments)
    except SystemExit:
        return message.getvalue().splitlines()[-1], parsed
    return f"unrecognized arguments: {' '.join(unknown)}" if unknown else None, parsed


def _check_make(targets: Sequence[str]) -> str | None:
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return next(
        (f"the Makefile has no target {one!r}" for one in targets if "=" not in one and one not in known),
        None,
    )


def _check_pip(arguments: Sequence[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for argument in arguments[1:]:
        wanted = re.fullmatch(r"slora\[(.+)\]", argument)
        if wanted and not set(wanted[1].split(",")) <= extras.keys():
            return f"{argument} names an extra that pyproject.toml does not have"
    return None if arguments[0] == "install" else f"pip {arguments[0]} is not known"


def _check_python(arguments: Sequence[str]) -> str | None:
    arguments = [one for one in arguments if one != "-P"]
    if arguments[0] == "-m" and arguments[1] == "pytest":
        paths = [one for one in arguments[2:] if "/" in one]
    elif arguments[0] == "-m":
        return None if importlib.util.find_spec(arguments[1]) else f"there is no module {arguments[1]}"
    else:
        paths = [arguments[0]]
    return next((f"{path} does not exist" for path in paths if not (ROOT / path).exists()), None)


def _check_docker(arguments: Sequence[str]) -> str | None:
    services = [
        service
        for name in ("docker-compose.yml", "docker-compose.gpu.yml")
        for service in yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["services"].values()
    ]
    profiles = {profile for service in services for profile in service.get("profiles", ())}
    named = [arguments[at + 1] for at, one in enumerate(arguments) if one == "--profile"]
    files = [arguments[at + 1] for at, one in enumerate(arguments) if one in ("-f", "--file")]
    missing = [one for one in named if one not in profiles] + [
        one for one in files if not (ROOT / one).exists()
    ]
    return f"the compose files have no {', '.join(missing)}" if missing else None


def _check_gpu_script(arguments: Sequence[str]) -> str | None:
    return _parse(make_gpu_parser(), arguments)[0]


def _check_nothing(_: Sequence[str]) -> str | None:
    return None


# Programs of other projects have nothing that could be checked without them.
_CHECKS: dict[str, Callable[[Sequence[str]], str | None]] = {
    "slora": _check_slora,
    "make": _check_make,
    "pip": _check_pip,
    "uv": lambda arguments: _check_pip(arguments[1:]),
    "python": _check_python,
    "docker": _check_docker,
    "bench/gpu/all.sh": _check_gpu_script,
    **dict.fromkeys(
        (
            "curl",
            "export",
            "openssl",
            "kubectl",
            "nvidia-smi",
            "nvidia-cuda-mps-control",
            "redis-cli",
            "psql",
            "vllm",
        ),
        _check_nothing,
    ),
}


@cache
def find_flags() -> frozenset[str]:
    """The flags of all subcommands."""
    return frozenset(_walk_flags(_all_commands()))


def _walk_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _walk_flags(one)
