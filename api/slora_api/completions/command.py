"""`slora complete`: sends one prompt and prints the answer as it streams in."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from slora_api.cli.remote import CommandFailed, check, explained, tenant_client

DEFAULT_MAX_TOKENS = 256


def answer_path(arguments: argparse.Namespace) -> str:
    """Returns the route that takes the prompt."""
    return "/v1/completions" if arguments.raw else "/v1/chat/completions"


def prompt_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the request fields for the prompt and its flags. Raises CommandFailed for flags that contradict each
    other.
    """
    if arguments.system and arguments.raw:
        raise CommandFailed("--system needs chat messages; omit --raw")
    limit = DEFAULT_MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens
    body: dict[str, Any] = {"max_tokens": limit}
    for name in ("temperature", "seed"):
        if getattr(arguments, name) is not None:
            body[name] = getattr(arguments, name)
    if arguments.raw:
        return body | {"prompt": arguments.prompt}
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return body | {"messages": [*system, {"role": "user", "content": arguments.prompt}]}


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event up to [DONE]. Raises CommandFailed on an error event."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise CommandFailed(chunk["error"]["message"])
            yield chunk
    raise CommandFailed("the connection ended before the answer was complete")


def _text(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    text: str | None = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text or ""


@explained
def complete(arguments: argparse.Namespace) -> None:
    body = {"model": arguments.model, "stream": True, **prompt_fields(arguments)}
    with tenant_client() as client, client.stream("POST", answer_path(arguments), json=body) as response:
        if not response.is_success:
            response.read()
            check(response)
        is_empty = True
        for chunk in _chunks(response):
            text = _text(chunk)
            is_empty = is_empty and not text
            print(text, end="", flush=True)
    print()
    answered_by = response.headers.get("x-slora-adapter")
    if answered_by not in (None, arguments.model):
        # On standard error, so that standard output has the answer only. An alias may split requests between versions.
        print(f"answered by {answered_by}", file=sys.stderr)
    if is_empty:
        hint = (
            "; a model trained on chat messages may need a chat template: omit --raw" if arguments.raw else ""
        )
        print(f"slora: the answer is empty{hint}", file=sys.stderr)
