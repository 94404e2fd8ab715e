"""`slora tenant`: tenants, seen by the operator."""

import argparse

from slora_api.commands.remote import admin_client, check, explained

__all__ = ["create", "show"]


@explained
def create(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        tenant = check(client.post("/admin/tenants", json={"name": arguments.name}))
    print(tenant["name"])


@explained
def show(_arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        for tenant in check(client.get("/admin/tenants"))["data"]:
            print(tenant["name"])
