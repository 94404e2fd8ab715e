"""`slora batch`: a tenant's commands for batches of requests."""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from slora_adapters.process.progress_bar import count_reads, show_progress
from slora_api.cli.declaration import argument, command
from slora_api.cli.output import Columns, Record, print_json, print_records
from slora_api.cli.remote import CommandFailed, check, explained, tenant_client, walk

_POLL_S = 2.0
_ENDED = ("completed", "failed", "expired", "cancelled")
# Number of batches on one page.
_PAGE = 100


def _counts(batch: Record) -> str:
    counts = batch["request_counts"]
    return f"{counts['completed']} + {counts['failed']} of {counts['total']}"


_COLUMNS: Columns = {
    "ID": lambda one: one["id"],
    "STATUS": lambda one: one["status"],
    "ANSWERED + FAILED": _counts,
    "ENDPOINT": lambda one: one["endpoint"],
    "CREATED (UTC)": lambda one: datetime.fromtimestamp(one["created_at"], UTC).strftime("%Y-%m-%d %H:%M"),
}


@command(
    "batch submit",
    "upload a file with one request in each line and start a batch",
    argument("file", metavar="FILE"),
    argument(
        "--endpoint",
        metavar="PATH",
        default="/v1/chat/completions",
        help="the route that answers the requests (default /v1/chat/completions)",
    ),
    argument("--wait", action="store_true", help="wait until the batch has ended"),
    has_json=True,
)
@explained
def submit(arguments: argparse.Namespace) -> None:
    path = Path(arguments.file)
    if not path.is_file():
        raise CommandFailed(f"{str(path)!r} is not a file; name a file with one request in each line")
    with tenant_client() as client, path.open("rb") as file:
        form = {"purpose": "batch"}
        with show_progress("Uploading", path.stat().st_size) as advance:
            files = {"file": (path.name, count_reads(file, advance))}
            stored = check(client.post("/v1/files", data=form, files=files))
        body = {"input_file_id": stored["id"], "endpoint": arguments.endpoint, "completion_window": "24h"}
        batch = check(client.post("/v1/batches", json=body))
        while arguments.wait and batch["status"] not in _ENDED:
            time.sleep(_POLL_S)
            batch = _find(client, batch["id"])
    _print(batch, as_json=arguments.json)


@command("batch list", "list the batches of your tenant, newest first", has_json=True)
@explained
def show_all(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        print_records(walk(client, "/v1/batches", limit=_PAGE), _COLUMNS, as_json=arguments.json)


_BATCH = argument("batch", metavar="BATCH_ID")


@command("batch show", "show the state of a batch, and why it failed", _BATCH, has_json=True)
@explained
def show(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        _print(_find(client, arguments.batch), as_json=arguments.json)


@command("batch cancel", "cancel a batch; its answers so far are kept", _BATCH, has_json=True)
@explained
def cancel(arguments: argparse.Namespace) -> None:
    with tenant_client() as client:
        _print(check(client.post(f"{_path(arguments.batch)}/cancel")), as_json=arguments.json)


@command(
    "batch output",
    "print the answers of a batch, one JSON object in each line",
    _BATCH,
    argument("--errors", action="store_true", help="print the lines that failed instead"),
)
@explained
def output(arguments: argparse.Namespace) -> None:
    """Prints the answers, or with `--errors` the lines that failed."""
    kind = "error_file_id" if arguments.errors else "output_file_id"
    with tenant_client() as client:
        batch = _find(client, arguments.batch)
        if batch["status"] not in _ENDED:
            raise CommandFailed(f"the batch is {batch['status']}; its answers can be read when it has ended")
        if batch[kind] is None:
            raise CommandFailed("no line of the batch failed" if arguments.errors else "no line was answered")
        with client.stream("GET", f"/v1/files/{batch[kind]}/content") as answer:
            if not answer.is_success:
                answer.read()
                check(answer)
            for text in answer.iter_text():
                sys.stdout.write(text)


def _path(batch: str) -> str:
    return f"/v1/batches/{quote(batch, safe='')}"


def _find(client: httpx.Client, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = check(client.get(_path(batch)))
    return found


def _print(batch: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(batch)
        return
    print_records([batch], _COLUMNS, as_json=False)
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"{where}{error['message']}")
