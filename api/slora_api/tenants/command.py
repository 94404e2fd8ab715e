"""`slora tenant`: the operator's commands for tenants."""

import argparse
from typing import Any
from urllib.parse import quote

from slora_api.cli.declaration import Declare, argument, command
from slora_api.cli.output import print_json, print_records
from slora_api.cli.remote import admin_client, check, explained, nothing_to_change, walk

_SHARE = ("weight", "min_pool_share", "max_pool_share", "priority")


def _path(tenant: str) -> str:
    return f"/admin/tenants/{quote(tenant, safe='')}"


def _share(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the share that the command line sets."""
    return {name: value for name in _SHARE if (value := getattr(arguments, name)) is not None}


_COLUMNS = {
    "TENANT": lambda tenant: tenant["name"],
    "STATUS": lambda tenant: tenant["status"],
    "WEIGHT": lambda tenant: f"{tenant['weight']:g}",
    "MIN POOL": lambda tenant: f"{tenant['min_pool_share']:g}",
    "MAX POOL": lambda tenant: f"{tenant['max_pool_share']:g}",
    "PRIORITY": lambda tenant: f"{tenant['priority']:g}",
}


def _share_arguments(*defaults: object) -> tuple[Declare, ...]:
    """defaults: of the weight, the shares and the priority, as the help shows them; none if they stay unchanged."""
    shown = [f" (default {default})" for default in defaults] or [""] * len(_SHARE)
    weight, min_share, max_share, priority = shown
    return (
        argument("name"),
        argument(
            "--weight",
            type=float,
            metavar="X",
            help="share of the served tokens, relative to other tenants' weights" + weight,
        ),
        argument(
            "--min-pool-share",
            type=float,
            metavar="X",
            help="fraction of the page pool that other tenants cannot take from this tenant once it uses it"
            + min_share,
        ),
        argument(
            "--max-pool-share",
            type=float,
            metavar="X",
            help="largest fraction of the page pool that this tenant may hold" + max_share,
        ),
        argument(
            "--priority",
            type=int,
            metavar="N",
            help="priority class of the tenant; the scheduler serves lower numbers first" + priority,
        ),
    )


@command("tenant create", "create a tenant", *_share_arguments(1, 0, 1, 0))
@explained
def create(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        tenant = check(client.post("/admin/tenants", json={"name": arguments.name, **_share(arguments)}))
    print(tenant["name"])


@command(
    "tenant set",
    "change a tenant's share; it applies from the next request",
    *_share_arguments(),
    has_json=True,
)
@explained
def change(arguments: argparse.Namespace) -> None:
    share = _share(arguments)
    if not share:
        raise nothing_to_change(_SHARE)
    with admin_client() as client:
        tenant = check(client.patch(_path(arguments.name), json=share))
    print_records([tenant], _COLUMNS, as_json=arguments.json)


@command(
    "tenant rename",
    "rename a tenant; its keys, adapters and usage stay",
    argument("name"),
    argument("new_name", metavar="NEW"),
)
@explained
def rename(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.patch(_path(arguments.name), json={"name": arguments.new_name}))
    print(f"tenant {arguments.name} is now {arguments.new_name}")


@command("tenant suspend", "refuse a tenant's requests, and end those in progress", argument("name"))
@explained
def suspend(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.post(_path(arguments.name) + "/suspend"))
    print(f"tenant {arguments.name} is suspended; `slora tenant resume {arguments.name}` serves it again")


@command("tenant resume", "serve a suspended tenant again", argument("name"))
@explained
def resume(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        check(client.post(_path(arguments.name) + "/resume"))
    print(f"tenant {arguments.name} is active")


@command(
    "tenant purge",
    "delete a tenant with its keys, adapters and stored bytes, for ever",
    argument("name"),
    argument(
        "--confirm", required=True, metavar="NAME", help="the name again, because a purge cannot be undone"
    ),
    argument(
        "--ledger", required=True, choices=("keep", "erase"), help="keep or erase what the tenant has used"
    ),
    epilog="Repeat a purge that was interrupted.",
    has_json=True,
)
@explained
def purge(arguments: argparse.Namespace) -> None:
    body = {"confirm": arguments.confirm, "ledger": arguments.ledger}
    with admin_client() as client:
        purged = check(client.post(_path(arguments.name) + "/purge", json=body))
    if arguments.json:
        print_json(purged)
        return
    usage = "usage kept" if purged["usage_records"] is None else f"{purged['usage_records']} usage records"
    print(
        f"purged tenant {arguments.name}: {purged['keys']} keys, {purged['adapters']} adapters with "
        f"{purged['versions']} versions, {purged['blobs']} blobs ({purged['blob_bytes']} bytes; {purged['blobs_kept']} "
        f"kept for others), {purged['pool_pages']} pages ({purged['pool_bytes']} bytes), {usage}"
    )


@command("tenant list", "list the tenants with their status and share", has_json=True)
@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print_records(list(walk(client, "/admin/tenants")), _COLUMNS, as_json=arguments.json)
