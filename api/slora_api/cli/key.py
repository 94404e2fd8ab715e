"""`slora key`: API keys, seen by the operator."""

import argparse
import sys
from urllib.parse import quote

from slora_api.cli.remote import admin_client, check, explained

__all__ = ["create", "revoke", "show"]


def _keys_path(tenant: str) -> str:
    return f"/admin/tenants/{quote(tenant, safe='')}/keys"


@explained
def create(arguments: argparse.Namespace) -> None:
    body = {} if arguments.adapter is None else {"adapter": arguments.adapter}
    with admin_client() as client:
        made = check(client.post(_keys_path(arguments.tenant), json=body))
    print(made["key"])
    print(f"key {made['key_id']} made; it cannot be shown again", file=sys.stderr)


@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        for key in check(client.get(_keys_path(arguments.tenant)))["data"]:
            state = "revoked" if key["revoked"] else "active"
            print(f"{key['key_id']}  {state:8}  default adapter: {key['adapter'] or '(base model)'}")


@explained
def revoke(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.delete(f"/admin/keys/{quote(arguments.key_id, safe='')}"))
    print(f"key {arguments.key_id} revoked")
