"""`slora adapter versions`, `alias` and `rollback`: manage the versions that a name and its aliases serve."""

import argparse
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from slora_api.cli.output import print_json, print_records
from slora_api.cli.remote import CommandFailed, check, explained, tenant_client, walk


def _read_targets(words: Sequence[str]) -> dict[str, int]:
    """Parses the targets of an alias: `3` is version 3 for all requests, `3=90 4=10` splits the requests. The server
    checks the sum.
    """
    targets: dict[str, int] = {}
    for word in words:
        number, equals, weight = word.partition("=")
        if not number.isdecimal() or (equals and not weight.isdecimal()) or number in targets:
            raise CommandFailed(
                f"the target {word!r} is not valid: write VERSION=PERCENT, such as 4=10, and each version only once"
            )
        if not equals and len(words) > 1:
            raise CommandFailed(
                f"{word!r} has no percentage; several versions each need one, such as {word}=10"
            )
        targets[number] = int(weight) if equals else 100
    return targets


def _path(arguments: argparse.Namespace) -> str:
    return f"/v1/adapters/{quote(arguments.name, safe='')}/aliases/{quote(arguments.alias, safe='')}"


def _print_alias(alias: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(alias)
        return
    targets = "  ".join(f"{number}={weight}" for number, weight in alias["versions"].items())
    line = f"{alias['name']}@{alias['alias']}  {targets}"
    print(line + "  follows pushes" if alias["follows_pushes"] else line)


_VERSION_COLUMNS = {
    "VERSION": lambda version: f"{version['name']}@{version['version']}",
    "RANK": lambda version: str(version["rank"]),
    "BYTES": lambda version: str(version["bytes"]),
    "ALIASES": lambda version: " ".join(
        f"{alias}={percent}" for alias, percent in version["aliases"].items()
    ),
    "DIGEST": lambda version: version["digest"],
}


@explained
def versions(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        found = walk(client, f"/v1/adapters/{quote(arguments.name, safe='')}/versions")
        print_records(found, _VERSION_COLUMNS, as_json=arguments.json)


@explained
def move(arguments: argparse.Namespace) -> None:
    """Moves or deletes an alias. Shows the alias if the user gives neither versions nor `--delete`."""
    is_move = bool(arguments.versions)
    if not is_move and (arguments.expect is not None or arguments.follow):
        raise CommandFailed("--expect and --follow apply to moving an alias; give the VERSION to move it to")
    if is_move and arguments.delete:
        raise CommandFailed("--delete deletes the alias; omit the versions")
    body: dict[str, Any] = {"versions": _read_targets(arguments.versions), "follows_pushes": arguments.follow}
    if arguments.expect is not None:
        body["expected"] = _read_targets(arguments.expect)
    with tenant_client() as client:
        if arguments.delete:
            check(client.delete(_path(arguments)))
            print(f"removed {arguments.name}@{arguments.alias}")
        elif is_move:
            _print_alias(check(client.put(_path(arguments), json=body)), as_json=arguments.json)
        else:
            _print_alias(check(client.get(_path(arguments))), as_json=arguments.json)


@explained
def roll_back(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        _print_alias(check(client.post(_path(arguments) + "/rollback")), as_json=arguments.json)
