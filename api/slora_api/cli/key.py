"""`slora key`: the operator's commands for API keys."""

import argparse
import sys
from urllib.parse import quote

from slora_api.cli.output import print_json, print_records
from slora_api.cli.remote import admin_client, check, explained

__all__ = ["create", "revoke", "show"]


def _keys_path(tenant: str) -> str:
    return f"/admin/tenants/{quote(tenant, safe='')}/keys"


_COLUMNS = {
    "KEY": lambda key: key["key_id"],
    "STATE": lambda key: "revoked" if key["revoked"] else "active",
    "DEFAULT MODEL": lambda key: key["adapter"] or "the base model",
}


@explained
def create(arguments: argparse.Namespace) -> None:
    body = {} if arguments.adapter is None else {"adapter": arguments.adapter}
    with admin_client() as client:
        made = check(client.post(_keys_path(arguments.tenant), json=body))
    if arguments.json:
        print_json(made)
        return
    print(made["key"])
    print(f"created key {made['key_id']}; the server cannot show it again", file=sys.stderr)


@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        keys = check(client.get(_keys_path(arguments.tenant)))["data"]
    print_records(keys, _COLUMNS, as_json=arguments.json)


@explained
def revoke(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.delete(f"/admin/keys/{quote(arguments.key_id, safe='')}"))
    print(f"key {arguments.key_id} revoked")
