"""`slora quota`: the operator's commands for the quotas of tenants and keys."""

import argparse
from typing import Any
from urllib.parse import quote

from slora.core.setting import ByteSize
from slora_api.cli.declaration import argument, command
from slora_api.cli.output import Columns, print_json, print_records
from slora_api.cli.remote import CommandFailed, admin_client, check, explained, nothing_to_change

_LIMITS = {
    "requests_per_minute": "requests in any 60 seconds",
    "tokens_per_minute": "tokens of prompts and answers in any 60 seconds",
    "tokens_per_day": "tokens of a day (UTC)",
    "tokens_per_month": "tokens of a month (UTC)",
    "concurrent_answers": "answers in progress; each prompt and each choice of a request counts",
    "composed_adapters": "adapters that one request combines",
    "adapter_versions": "versions of adapters; of a tenant only",
    "stored_bytes": "bytes stored for adapters, such as 20GiB; of a tenant only",
}
_SUBJECT = (
    argument("tenant", nargs="?"),
    argument("--key", metavar="KEY_ID", help="the quota of this key instead of a tenant's"),
)
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


@command(
    "quota set",
    "change the quota of a tenant or of one of its keys; it applies from the next request",
    *_SUBJECT,
    *(
        argument(f"--{field.replace('_', '-')}", metavar="N", help=help_text)
        for field, help_text in _LIMITS.items()
    ),
    epilog="The value none removes a limit. A request must fit into the quotas of its tenant and of its key.",
    has_json=True,
)
@explained
def change(arguments: argparse.Namespace) -> None:
    given = {field: getattr(arguments, field) for field in _LIMITS}
    changes = {field: _read(field, text) for field, text in given.items() if text is not None}
    if not changes:
        raise nothing_to_change(given)
    with admin_client() as client:
        _print(check(client.patch(_path(arguments), json=changes)), as_json=arguments.json)


@command(
    "quota show",
    "show the limits of a tenant or a key, and what is used of them",
    *_SUBJECT,
    has_json=True,
)
@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        _print(check(client.get(_path(arguments))), as_json=arguments.json)


def _read(field: str, text: str) -> int | None:
    if text == "none":
        return None
    is_size = field == "stored_bytes"
    try:
        return ByteSize().read(text) if is_size else int(text)
    except ValueError:
        accepted = ByteSize().accepted if is_size else "a whole number"
        raise CommandFailed(
            f"--{field.replace('_', '-')} is {text!r}; give {accepted}, or none to remove the limit"
        ) from None
