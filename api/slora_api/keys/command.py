"""`slora key` and `slora admin-key`: the operator's commands for the API keys of tenants and operators."""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from slora_api.cli.output import Columns, print_json, print_records
from slora_api.cli.remote import admin_client, check, explained, walk

_OPERATOR_KEYS = "/admin/keys"


def _keys_path(tenant: str) -> str:
    return f"/admin/tenants/{quote(tenant, safe='')}/keys"


def _state(key: Mapping[str, Any]) -> str:
    if key["revoked"]:
        return "revoked"
    is_expired = key["expires_at"] is not None and key["expires_at"] <= time.time()
    if key["replaced_by"] and not is_expired:
        return "rotated"
    return "expired" if is_expired else "active"


def _time(unix_time: int | None, otherwise: str) -> str:
    return otherwise if unix_time is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time))


_OPERATOR_COLUMNS = {
    "KEY": lambda key: key["key_id"],
    "NAME": lambda key: key["name"] or "-",
    "STATE": _state,
    "EXPIRES": lambda key: _time(key["expires_at"], "never"),
    "LAST USED": lambda key: _time(key["last_used_at"], "never"),
    "SCOPES": lambda key: ",".join(key["scopes"]),
}
_COLUMNS = {
    **_OPERATOR_COLUMNS,
    "DEFAULT MODEL": lambda key: key["adapter"] or "the base model",
    "MODELS": lambda key: "all" if key["models"] is None else ",".join(key["models"]),
}


def _create(path: str, wanted: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Creates a key from the fields of `wanted` that are set, and prints it."""
    body = {name: value for name, value in wanted.items() if value is not None}
    if arguments.expires_s is not None:
        body["expires_at"] = int(time.time()) + arguments.expires_s
    with admin_client() as client:
        made = check(client.post(path, json=body))
    if arguments.json:
        print_json(made)
        return
    print(made["key"])
    print(f"created key {made['key_id']}; the server cannot show it again", file=sys.stderr)


def _show(path: str, columns: Columns, arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print_records(walk(client, path), columns, as_json=arguments.json)


@explained
def create(arguments: argparse.Namespace) -> None:
    wanted = {name: getattr(arguments, name) for name in ("name", "adapter", "scopes", "models")}
    _create(_keys_path(arguments.tenant), wanted, arguments)


@explained
def create_operator_key(arguments: argparse.Namespace) -> None:
    _create(_OPERATOR_KEYS, {"name": arguments.name, "scopes": arguments.scopes}, arguments)


@explained
def show(arguments: argparse.Namespace) -> None:
    _show(_keys_path(arguments.tenant), _COLUMNS, arguments)


@explained
def show_operator_keys(arguments: argparse.Namespace) -> None:
    _show(_OPERATOR_KEYS, _OPERATOR_COLUMNS, arguments)


@explained
def rotate(arguments: argparse.Namespace) -> None:
    path = f"/admin/keys/{quote(arguments.key_id, safe='')}/rotate"
    _create(path, {"overlap_seconds": arguments.overlap_s}, arguments)


@explained
def revoke(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.delete(f"/admin/keys/{quote(arguments.key_id, safe='')}"))
    print(f"key {arguments.key_id} revoked")
