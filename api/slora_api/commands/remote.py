"""The server as the command line sees it: one HTTP client, and every failure as one clear line.

Knows no subcommand. Handlers are wrapped in `explained`, so that none of them prints a traceback.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx

__all__ = ["CommandFailed", "admin_client", "check", "explained", "tenant_client"]

DEFAULT_URL = "http://127.0.0.1:8000"
# An upload is validated before the answer comes, and a first token may wait for an adapter.
TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class CommandFailed(Exception):
    """The command cannot do what was asked; the message is for the user's eyes."""


def _client(variable: str, owner: str) -> httpx.Client:
    key = os.environ.get(variable)
    if not key:
        raise CommandFailed(f"{variable} is not set; export {variable}=... with {owner} key")
    url = os.environ.get("SLORA_URL") or DEFAULT_URL
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT)


def admin_client() -> httpx.Client:
    """A client with the operator's key. Raises CommandFailed without SLORA_ADMIN_KEY."""
    return _client("SLORA_ADMIN_KEY", "the operator's")


def tenant_client() -> httpx.Client:
    """A client with a tenant's key. Raises CommandFailed without SLORA_API_KEY."""
    return _client("SLORA_API_KEY", "a tenant's")


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        reasons = "".join(f"\n  {reason['code']}: {reason['message']}" for reason in error.get("reasons", ()))
        return str(error["message"]) + reasons
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}, which is not in this API's form; is SLORA_URL right?"


def check(response: httpx.Response) -> Any:
    """The body of a successful answer (None if empty); raises CommandFailed with the server's own words."""
    if response.is_success:
        return response.json() if response.content else None
    raise CommandFailed(_message(response))


def explained(handler: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """Turns a handler that raises into one that prints a line and returns the exit code."""

    @functools.wraps(handler)
    def run(arguments: argparse.Namespace) -> int:
        try:
            handler(arguments)
        except CommandFailed as failure:
            print(f"slora: {failure}", file=sys.stderr)
            return 1
        except httpx.InvalidURL as failure:
            print(f"slora: SLORA_URL is not an address: {failure}", file=sys.stderr)
            return 1
        except httpx.TransportError as failure:
            url = os.environ.get("SLORA_URL") or DEFAULT_URL
            print(f"slora: no answer from {url} ({failure}); is the server running?", file=sys.stderr)
            return 1
        return 0

    return run
