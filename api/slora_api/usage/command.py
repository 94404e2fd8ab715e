"""`slora usage`: shows the usage of one tenant or of all tenants."""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx

from slora_api.cli.declaration import JSON, argument, command, one_of
from slora_api.cli.output import Columns, Record, print_records
from slora_api.cli.remote import admin_client, check, explained, tenant_client

_WIDTHS = {"minute": "1m", "hour": "1h", "day": "1d"}
_DURATION = re.compile(r"([0-9]{1,6})([mhd])", re.ASCII)
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_SUMS: Columns = {
    "REQUESTS": lambda one: str(one["num_model_requests"]),
    "INPUT": lambda one: str(one["input_tokens"]),
    "CACHED": lambda one: str(one["input_cached_tokens"]),
    "OUTPUT": lambda one: str(one["output_tokens"]),
    "ADAPTER BYTES": lambda one: str(one["adapter_bytes"]),
    "PAGE SECONDS": lambda one: f"{one['page_seconds']:.1f}",
    "BATCH": lambda one: str(one["batch_input_tokens"] + one["batch_output_tokens"]),
    "BILLED": lambda one: f"{one['billed_input_tokens'] + one['billed_output_tokens']:.0f}",
}
_GROUPS: Columns = {
    "tenant": lambda one: one["tenant"] or "",
    "api_key_id": lambda one: one["api_key_id"] or "",
    "model": lambda one: one["model"] or one["adapter_digest"] or "",
}


@command(
    "usage",
    None,
    argument("--tenant", metavar="NAME", help="show this tenant (operator)"),
    argument("--by", choices=("minute", "hour", "day"), default="day", help="default day"),
    argument(
        "--since",
        metavar="TIME",
        help="30m, 24h or 7d ago, a time in ISO 8601, or Unix seconds (default: the last 60 minutes, 24 hours or "
        "7 days)",
    ),
    argument("--until", metavar="TIME", help="end of the time range, in the same forms (default: now)"),
    argument(
        "--group-by",
        metavar="NAMES",
        help="show a sum for each api_key_id, model or (operator) tenant; give one or more names, separated by commas",
    ),
    one_of(JSON, argument("--csv", action="store_true", help="print CSV for spreadsheets")),
)
@explained
def show(arguments: argparse.Namespace) -> None:
    groups = arguments.group_by.split(",") if arguments.group_by else []
    # Only an operator may name tenants or group by tenant. Such a request uses the admin key, even if both keys are
    # set.
    is_operator = arguments.tenant is not None or "tenant" in groups or not os.environ.get("SLORA_API_KEY")
    params = {
        "bucket_width": _WIDTHS[arguments.by],
        "start_time": None if arguments.since is None else _read_time(arguments.since),
        "end_time": None if arguments.until is None else _read_time(arguments.until),
        "group_by": arguments.group_by,
        "tenant": arguments.tenant,
    }
    asked = {name: value for name, value in params.items() if value is not None}
    path = "/admin/usage" if is_operator else "/v1/usage"
    with admin_client() if is_operator else tenant_client() as client:
        if arguments.csv:
            _print_csv(client, path, asked)
            return
        results = list(_results(client, path, asked))
    shown = {name.upper().replace("_", " "): cell for name, cell in _GROUPS.items() if name in groups}
    print_records(results, {"START (UTC)": _show_start, **shown, **_SUMS}, as_json=arguments.json)


def _results(client: httpx.Client, path: str, asked: dict[str, str]) -> Iterator[Record]:
    """Yields the results of all pages. Each result gets the start and end time of its bucket."""
    while True:
        page = check(client.get(path, params=asked))
        for bucket in page["data"]:
            times = {name: bucket[name] for name in ("start_time", "end_time")}
            yield from ({**times, **result} for result in bucket["results"])
        if not page["has_more"]:
            return
        asked = {**asked, "page": page["next_page"]}


def _print_csv(client: httpx.Client, path: str, asked: dict[str, str]) -> None:
    with client.stream("GET", path, params={**asked, "format": "csv"}) as answer:
        if not answer.is_success:
            answer.read()
            check(answer)
        for text in answer.iter_text():
            sys.stdout.write(text)


def _show_start(result: Record) -> str:
    return datetime.fromtimestamp(result["start_time"], UTC).strftime("%Y-%m-%d %H:%M")


def _read_time(text: str) -> str:
    """Converts `7d` to the time seven days ago. The server parses all other forms."""
    if match := _DURATION.fullmatch(text):
        return str(time.time() - int(match[1]) * _SECONDS[match[2]])
    return text
