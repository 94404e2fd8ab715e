"""The HTTP client of the command line. `explained` turns every failure of a subcommand into one line of text."""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx

from slora.core.setting import SettingRefused
from slora_api.core.data_dir import find_running_url
from slora_api.core.listing import MAX_LIMIT
from slora_api.core.server_address import explain_service_links, is_loopback, own_url, without_service_links
from slora_api.core.settings import server_setting_specs

# The timeout is long, because the server answers an upload after validating it, and a first token may wait for an
# adapter to load.
TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class CommandFailed(Exception):
    """The command cannot do what the user asked. The message is shown to the user."""


def nothing_to_change(fields: Iterable[str]) -> CommandFailed:
    """Returns the error of a command that was called without any change to make. fields: the API's names of the fields
    that the command can change.
    """
    flags = ", ".join(f"--{field.replace('_', '-')}" for field in fields)
    return CommandFailed(f"there is nothing to change; give at least one of {flags}")


def server_url() -> str:
    """Returns SLORA_URL; by default, where a server with the same SLORA_HOST and SLORA_PORT listens. Raises
    CommandFailed for a port that is none.
    """
    if url := os.environ.get("SLORA_URL"):
        return url
    specs = {spec.name: spec for spec in server_setting_specs()}
    environment, found = without_service_links(os.environ), []
    for spec in (specs["host"], specs["port"]):
        text = environment.get(spec.variable)
        try:
            found.append(spec.parse(text, spec.variable) if text else spec.default)
        except SettingRefused as error:
            raise CommandFailed(str(error)) from None
    return own_url(*found)


def _hint_at_server() -> str:
    """Returns where else a server listens, as the end of a sentence."""
    data_dir = os.environ.get("SLORA_DATA_DIR") or "data"
    running = find_running_url(Path(data_dir))
    if running is not None and running != server_url():
        return f"; the server with the data directory {data_dir} listens on {running}: export SLORA_URL={running}"
    return (
        "" if os.environ.get("SLORA_URL") else ", or set SLORA_URL to the address that `slora serve` printed"
    )


class _Client(httpx.Client):
    """Sends what the user typed, also if the locale cannot decode it. Python then keeps the bytes as surrogates."""

    def build_request(self, method: str, url: httpx.URL | str, **fields: Any) -> httpx.Request:
        for name in fields.keys() & {"json", "params", "data"}:
            fields[name] = _decode_typed(fields[name])
        return super().build_request(method, _decode_typed(url), **fields)


def _decode_typed(value: Any) -> Any:
    """Returns the value with all texts decoded as UTF-8. Raises CommandFailed for a text that is not UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8")
        except UnicodeError:
            raise CommandFailed(
                f"{value!a} is not valid UTF-8; set LC_ALL to the terminal's locale"
            ) from None
    if isinstance(value, dict):
        return {name: _decode_typed(one) for name, one in value.items()}
    return [_decode_typed(one) for one in value] if isinstance(value, list) else value


def open_client(headers: dict[str, str]) -> httpx.Client:
    """Opens an HTTP client for the server."""
    for line in explain_service_links(os.environ):
        print(f"slora: {line}", file=sys.stderr)
    url = server_url()
    # With a transport of its own, httpx uses no proxy. Only SLORA_URL can name a server on another machine.
    is_own = not os.environ.get("SLORA_URL") or is_loopback(url)
    transport = httpx.HTTPTransport() if is_own else None
    return _Client(base_url=url, headers=headers, timeout=TIMEOUT, transport=transport)


def _read_key(variable: str, owner: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise CommandFailed(f"{variable} is not set; export {variable}=... with {owner} key")
    return key


def admin_key() -> str:
    """Returns the admin key. Raises CommandFailed without SLORA_ADMIN_KEY."""
    return _read_key("SLORA_ADMIN_KEY", "the operator's")


def admin_client() -> httpx.Client:
    """Opens a client with the admin key. Raises CommandFailed without SLORA_ADMIN_KEY."""
    return open_client({"Authorization": f"Bearer {admin_key()}"})


def tenant_client() -> httpx.Client:
    """Opens a client with a tenant's API key. Raises CommandFailed without SLORA_API_KEY."""
    key = _read_key("SLORA_API_KEY", "a tenant's")
    return open_client({"Authorization": f"Bearer {key}"})


def error_text(response: httpx.Response) -> str:
    """Returns the server's message of a failed answer, or one that says where to look if it has none."""
    try:
        error = response.json()["error"]
        reasons = [f"  {reason['code']}: {reason['message']}" for reason in error.get("reasons", ())]
        # If an error has reasons, its message repeats them in one line, so the message is not shown.
        return "\n".join(["the server refuses this adapter:", *reasons]) if reasons else str(error["message"])
    except (ValueError, KeyError, TypeError):
        return (
            f"the server answered {response.status_code} without an error message of slora; check SLORA_URL"
        )


def error_code(response: httpx.Response) -> str | None:
    """Returns the error code of a failed answer; None for a success, and for an answer that is not from this API."""
    try:
        code = None if response.is_success else response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code)


def check(response: httpx.Response) -> Any:
    """Returns the body of a successful answer (None if empty). Raises CommandFailed with the server's message."""
    if response.is_success:
        return response.json() if response.content else None
    raise CommandFailed(error_text(response))


def walk(client: httpx.Client, path: str, **wanted: str | float) -> Iterator[Any]:
    """Yields the items of all pages of a list. Raises CommandFailed like `check`.

    wanted: further parameters of the request.
    """
    params: dict[str, str | float] = {"limit": MAX_LIMIT, **wanted}
    while True:
        page = check(client.get(path, params=params))
        yield from page["data"]
        if not page["has_more"]:
            return
        params["after"] = page["last_id"]


def explained(handler: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """Wraps a handler. The wrapper prints an error of the handler in one line, and returns the exit code."""

    @functools.wraps(handler)
    def run(arguments: argparse.Namespace) -> int:
        try:
            handler(arguments)
        except CommandFailed as failure:
            print(f"slora: {failure}", file=sys.stderr)
            return 1
        except httpx.InvalidURL as failure:
            print(
                f"slora: SLORA_URL={os.environ.get('SLORA_URL')!a} is not a valid URL: {failure}",
                file=sys.stderr,
            )
            return 1
        except httpx.TransportError as failure:
            place = f"no answer from {server_url()} ({failure})"
            print(f"slora: {place}; check that the server is running{_hint_at_server()}", file=sys.stderr)
            return 1
        return 0

    return run
