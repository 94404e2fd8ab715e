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

from slora_api.cli.declaration import argument, command, read_duration, read_positive
from slora_api.cli.output import Columns, print_records
from slora_api.cli.remote import CommandFailed, admin_client, check, explained, open_client, walk

POLL_S = 0.5
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


@command("engine list", "list the engines, whether they serve, and what they compute", has_json=True)
@explained
def show(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        print_records(_list(client), _COLUMNS, as_json=arguments.json)


@command(
    "engine restart",
    "restart an engine without a refused request, and wait until it serves again",
    argument("name", nargs="?", metavar="NAME", help="as in `slora engine list`"),
    argument("--rolling", action="store_true", help="restart all engines, one after the other"),
    argument(
        "--allow-outage",
        action="store_true",
        help="restart the engine even if no other engine serves: new requests are refused until it serves again",
    ),
    argument(
        "--timeout",
        type=read_duration,
        default=1800,
        metavar="TIME",
        dest="timeout_s",
        help="how long to wait for each engine: a number and s, m, h or d (default 30m)",
    ),
    epilog="The engine gets no new requests, and the other engines continue its answers. If no other engine serves, "
    "the restart is refused.",
)
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
        time.sleep(POLL_S)
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


@command(
    "health",
    None,
    argument("--ready", action="store_true", help="check whether the server can serve requests now"),
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


def _read_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-11-23T14:00") from None


@command(
    "audit log",
    "list changes of tenants, keys and adapters, newest first",
    argument("--tenant", metavar="T", help="only changes of this tenant"),
    argument("--actor", metavar="KEY_ID", help="only changes made with this key; bootstrap is the admin key"),
    argument("--action", metavar="NAME", help="only this action, such as key.revoke, or key for all on keys"),
    argument(
        "--since", type=_read_time, metavar="TIME", help="only from this time on, such as 2026-11-23T14:00"
    ),
    argument("--until", type=_read_time, metavar="TIME", help="only before this time"),
    argument(
        "--limit",
        type=read_positive,
        default=100,
        metavar="N",
        help="largest number of entries (default 100)",
    ),
    has_json=True,
)
@explained
def log(arguments: argparse.Namespace) -> None:
    with admin_client() as client:
        entries = islice(walk(client, "/admin/audit", **_filter(arguments)), arguments.limit)
        print_records(entries, _ENTRY_COLUMNS, as_json=arguments.json)
