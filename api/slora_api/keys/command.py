"""`slora key` and `slora admin-key`: the operator's commands for the API keys of tenants and operators."""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from slora_api.cli.declaration import Declare, argument, command, read_duration
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


def _expiry(default: str = "until it is revoked") -> Declare:
    return argument(
        "--expires",
        type=read_duration,
        metavar="TIME",
        dest="expires_s",
        help=f"how long the key is valid: a number and s, m, h or d, such as 30d (default: {default})",
    )


_KEY_ID = argument("key_id", help="as in slora_KEYID_..._...")


@command(
    "key create",
    "create an API key for a tenant and print it; it cannot be shown again",
    argument("tenant"),
    argument("--name", metavar="TEXT", help="a label for people, such as the program that gets the key"),
    argument("--adapter", metavar="NAME[@ALIAS]", help="the adapter that this key uses for model=default"),
    argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        dest="scopes",
        help="what the key may do: inference, adapters:read, adapters:write, usage:read or adapters:hub; can be given "
        "several times (default: all of them but adapters:hub, which lets the server download adapters from the hub)",
    ),
    argument(
        "--model",
        metavar="NAME[@ALIAS]",
        action="append",
        dest="models",
        help="a model that the key may use: an adapter, an alias or the base model; can be given several times "
        "(default: all models of the tenant)",
    ),
    _expiry(),
    has_json=True,
)
@explained
def create(arguments: argparse.Namespace) -> None:
    wanted = {name: getattr(arguments, name) for name in ("name", "adapter", "scopes", "models")}
    _create(_keys_path(arguments.tenant), wanted, arguments)


@command(
    "admin-key create",
    "create a key for an operator and print it; it cannot be shown again",
    argument("name", help="the person or program that gets the key"),
    argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        dest="scopes",
        help="what the key may do: admin (all that an operator may do) or metrics:read (only GET /metrics) "
        "(default: admin)",
    ),
    _expiry(),
    has_json=True,
)
@explained
def create_operator_key(arguments: argparse.Namespace) -> None:
    _create(_OPERATOR_KEYS, {"name": arguments.name, "scopes": arguments.scopes}, arguments)


_ROTATE = (
    "create a key with the same permissions and limits, and let the old one expire after an overlap",
    _KEY_ID,
    argument(
        "--overlap",
        type=read_duration,
        metavar="TIME",
        dest="overlap_s",
        help="how long the old key stays valid, at most 30d (default 1d)",
    ),
    _expiry("the lifetime of the old key"),
)


@command("key rotate", *_ROTATE, has_json=True)
@command("admin-key rotate", *_ROTATE, has_json=True)
@explained
def rotate(arguments: argparse.Namespace) -> None:
    path = f"/admin/keys/{quote(arguments.key_id, safe='')}/rotate"
    _create(path, {"overlap_seconds": arguments.overlap_s}, arguments)


@command("key list", "list a tenant's keys, without the secrets", argument("tenant"), has_json=True)
@explained
def show(arguments: argparse.Namespace) -> None:
    _show(_keys_path(arguments.tenant), _COLUMNS, arguments)


@command("admin-key list", "list the operators' keys, without the secrets", has_json=True)
@explained
def show_operator_keys(arguments: argparse.Namespace) -> None:
    _show(_OPERATOR_KEYS, _OPERATOR_COLUMNS, arguments)


@command("key revoke", "revoke a key immediately", _KEY_ID)
@command("admin-key revoke", "revoke a key immediately", _KEY_ID)
@explained
def revoke(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.delete(f"/admin/keys/{quote(arguments.key_id, safe='')}"))
    print(f"key {arguments.key_id} revoked")
