"""`slora quota`: the operator's commands for the quotas of tenants and keys."""

import argparse
from typing import Any
from urllib.parse import quote

from slora_api.cli.output import Columns, print_json, print_records
from slora_api.cli.remote import CommandFailed, admin_client, check, explained, nothing_to_change

_COLUMNS: Columns = {
    "QUOTA": lambda row: row["field"],
    "USED": lambda row: str(row["used"]),
    "LIMIT": lambda row: "none" if row["limit"] is None else str(row["limit"]),
}


def _path(arguments: argparse.Namespace) -> str:
    if (arguments.tenant is None) == (arguments.key is None):
        raise CommandFailed("name either a tenant or --key KEY_ID")
    if arguments.key is not None:
        return f"/admin/keys/{quote(arguments.key, safe='')}/quota"
    return f"/admin/tenants/{quote(arguments.tenant, safe='')}/quota"


def _print(shown: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(shown)
        return
    rows = [
        {"field": field, "used": shown["used"].get(field, "-"), "limit": limit}
        for field, limit in shown["limits"].items()
    ]
    print_records(rows, _COLUMNS, as_json=False)


@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        _print(check(client.get(_path(arguments))), as_json=arguments.json)


@explained
def change(arguments: argparse.Namespace) -> None:
    given = {field: getattr(arguments, field) for field in arguments.fields}
    changes = {field: _read(field, text) for field, text in given.items() if text is not None}
    if not changes:
        raise nothing_to_change(given)
    with admin_client() as client:
        _print(check(client.patch(_path(arguments), json=changes)), as_json=arguments.json)


def _read(field: str, text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise CommandFailed(
            f"--{field.replace('_', '-')} is {text!r}; give a whole number, or none to remove the limit"
        ) from None
