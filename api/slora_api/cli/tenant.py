"""`slora tenant`: tenants, seen by the operator."""

import argparse
from typing import Any
from urllib.parse import quote

from slora_api.cli.remote import CommandFailed, admin_client, check, explained

__all__ = ["change", "create", "show"]

_SHARE = ("weight", "min_pool_share", "max_pool_share", "priority")


def _share(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given of the share."""
    return {name: value for name in _SHARE if (value := getattr(arguments, name)) is not None}


def _summary(tenant: dict[str, Any]) -> str:
    share = "  ".join(f"{name} {tenant[name]:g}" for name in _SHARE)
    return f"{tenant['name']}  {share}"


@explained
def create(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        tenant = check(client.post("/admin/tenants", json={"name": arguments.name, **_share(arguments)}))
    print(tenant["name"])


@explained
def change(arguments: argparse.Namespace) -> None:
    share = _share(arguments)
    if not share:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in _SHARE)
        raise CommandFailed(f"nothing is to be changed; give at least one of {flags}")
    with admin_client() as client:
        print(_summary(check(client.patch(f"/admin/tenants/{quote(arguments.name, safe='')}", json=share))))


@explained
def show(_arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        for tenant in check(client.get("/admin/tenants"))["data"]:
            print(_summary(tenant))
