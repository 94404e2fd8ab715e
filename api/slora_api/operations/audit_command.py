"""`slora audit log`: prints the changes that the audit log has recorded."""

import argparse
from datetime import datetime
from itertools import islice
from typing import Any

from slora_api.cli.output import print_records
from slora_api.cli.remote import admin_client, explained, walk

_COLUMNS = {
    "TIME": lambda entry: datetime.fromtimestamp(entry["created"]).isoformat(" ", "seconds"),
    "ACTOR": lambda entry: entry["actor"] or entry["actor_kind"],
    "FROM": lambda entry: entry["address"],
    "ACTION": lambda entry: entry["action"],
    "TENANT": lambda entry: entry["tenant"],
    "TARGET": lambda entry: entry["target"],
}


def _filter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the query parameters for the filters that the user gives."""
    found = {name: getattr(arguments, name) for name in ("tenant", "actor", "action")}
    found |= {name: time.timestamp() for name in ("since", "until") if (time := getattr(arguments, name))}
    return {name: value for name, value in found.items() if value is not None}


@explained
def log(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        entries = islice(walk(client, "/admin/audit", **_filter(arguments)), arguments.limit)
        print_records(entries, _COLUMNS, as_json=arguments.json)
