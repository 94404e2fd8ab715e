"""`slora engine`: the operator's commands for the engine processes of a server.

`slora health`: checks whether the server answers or is ready. Container engines and scripts can run it without a
key.

`slora audit log`: prints the changes that the audit log has recorded.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx

from slora_api.cli.output import Columns, print_records
from slora_api.cli.remote import CommandFailed, admin_client, check, explained, open_client, walk

_POLL_S = 0.5
_ENGINES = "/admin/engines"


def _or_dash(write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else write(value)


_number = _or_dash(lambda value: f"{value:g}")
_rate = _or_dash(lambda value: f"{value:.1f}")
_text = _or_dash(str)
_COLUMNS: Columns = {
    "ENGINE": lambda one: one["name"],
    "STATE": lambda one: "serving" if one["serving"] else one["detail"],
    "DEVICE": lambda one: _text(one["device"]),
    "PAGES USED": lambda one: (
        "-" if one["num_pages"] is None else f"{one['used_pages']} of {one['num_pages']}"
    ),
    "RUNNING": lambda one: _number(one["running"]),
    "WAITING": lambda one: _number(one["waiting"]),
    "STEPS/S": lambda one: _rate(one["steps_per_s"]),
    "RESTARTS": lambda one: str(one["restarts"]),
}


def _list(client: httpx.Client) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] = check(client.get(_ENGINES))["data"]
    return found


@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print_records(_list(client), _COLUMNS, as_json=arguments.json)


@explained
def restart(arguments: argparse.Namespace) -> None:
    if bool(arguments.name) == arguments.rolling:
        raise CommandFailed("name one engine, or give --rolling to restart all of them, one after the other")
    with admin_client() as client:
        names = [one["name"] for one in _list(client)] if arguments.rolling else [arguments.name]
        for name in names:
            _restart(client, name, arguments.timeout_s, allow_outage=arguments.allow_outage)


def _restart(client: httpx.Client, name: str, timeout_s: float, *, allow_outage: bool) -> None:
    """Restarts one engine and waits until it serves again."""
    body = {"allow_outage": allow_outage}
    stopped = check(client.post(f"{_ENGINES}/{quote(name, safe='')}/restart", json=body))
    print(f"{name} stops; waiting until it serves again", flush=True)
    begun_at = time.monotonic()
    while True:
        time.sleep(_POLL_S)
        (found,) = (one for one in _list(client) if one["name"] == name)
        waited_s = time.monotonic() - begun_at
        if found["serving"] and found["restarts"] > stopped["restarts"]:
            print(f"{name} serves again after {waited_s:.1f} s", flush=True)
            return
        if waited_s > timeout_s:
            raise CommandFailed(
                f"{name} does not serve {timeout_s:g} s after its restart began (--timeout): "
                f"{found['detail'] or 'it has not ended yet'}; see the log of the server. No further engine is "
                "restarted"
            )


@explained
def health(arguments: argparse.Namespace) -> None:
    with open_client({}) as client:
        print(check(client.get("/readyz" if arguments.ready else "/healthz"))["status"])


_ENTRY_COLUMNS = {
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
        print_records(entries, _ENTRY_COLUMNS, as_json=arguments.json)
