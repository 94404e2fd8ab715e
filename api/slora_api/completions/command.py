"""`slora complete`: sends one prompt and prints the answer as it streams in.

`slora compare`: sends one prompt to several models at the same time and prints their answers side by side.
"""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import httpx

from slora_api.cli.declaration import argument, command
from slora_api.cli.output import print_json
from slora_api.cli.remote import CommandFailed, check, error_code, error_text, explained, tenant_client

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


_PROMPT = (
    argument("prompt"),
    argument("--raw", action="store_true", help="complete the prompt as it is, without a chat template"),
    argument("--system", metavar="TEXT", help="system message before the prompt"),
    argument(
        "--max-tokens", type=int, metavar="N", help="largest number of tokens of the answer (default 256)"
    ),
    argument(
        "--temperature",
        type=float,
        metavar="X",
        help="sampling temperature; 0 always takes the most probable token",
    ),
    argument("--seed", type=int, metavar="N"),
)


@command(
    "complete",
    None,
    argument("--model", default="default", help="name of an adapter or of the base model, or default"),
    *_PROMPT,
)
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


# Narrower columns are hard to read. If the columns would be narrower, the answers are printed one below the other.
_MIN_COLUMN_CHARS = 24

_GAP = " | "


@command(
    "compare",
    None,
    argument(
        "--models",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="names of adapters or of the base model, or default",
    ),
    *_PROMPT,
    # argparse would put the prompt last, where `--models` takes it as a name.
    usage="slora compare PROMPT --models MODEL [MODEL ...] [options]",
    has_json=True,
)
@explained
def compare(arguments: argparse.Namespace) -> None:
    path, fields = answer_path(arguments), prompt_fields(arguments)
    with tenant_client() as client, ThreadPoolExecutor(len(arguments.models)) as threads:
        posted = [
            threads.submit(client.post, path, json={"model": model, **fields}) for model in arguments.models
        ]
        answers = [post.result() for post in posted]
    named = list(zip(arguments.models, answers, strict=True))
    if arguments.json:
        print_json({"answers": [_describe(model, answer) for model, answer in named]})
    else:
        columns = [(str(_version(answer) or model), _answered_text(answer)) for model, answer in named]
        print(_lay_out(columns, shutil.get_terminal_size().columns))
    if num_failed := sum(not answer.is_success for answer in answers):
        raise CommandFailed(f"{num_failed} of {len(answers)} answers failed")


def _describe(model: str, answer: httpx.Response) -> dict[str, Any]:
    is_foreign = not answer.is_success and error_code(answer) is None
    body = {"error": {"message": error_text(answer)}} if is_foreign else answer.json()
    return {"model": model, "version": _version(answer), "status_code": answer.status_code, "body": body}


def _version(answer: httpx.Response) -> str | None:
    """Returns the version that answered; None for a model without versions, and for an error."""
    version: str | None = answer.headers.get("x-slora-adapter")
    return version


def _answered_text(answer: httpx.Response) -> str:
    if not answer.is_success:
        return f"error {answer.status_code}: {error_text(answer)}"
    choice = answer.json()["choices"][0]
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([*filter(None, [message["content"]]), *calls])


def _lay_out(answers: Sequence[tuple[str, str]], width: int) -> str:
    """Returns the answers side by side if they fit, and otherwise one below the other. answers: pairs of heading and
    text. width: the maximum number of characters of a line.
    """
    column = (width - len(_GAP) * (len(answers) - 1)) // len(answers)
    if column < _MIN_COLUMN_CHARS:
        return "\n\n".join(f"{heading}\n{'-' * len(heading)}\n{text}" for heading, text in answers)
    cells = [[*_wrap(heading, column), "-" * column, *_wrap(text, column)] for heading, text in answers]
    rows = zip_longest(*cells, fillvalue="")
    return "\n".join(_GAP.join(cell.ljust(column) for cell in row).rstrip() for row in rows)


def _wrap(text: str, width: int) -> list[str]:
    return [line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""]]
