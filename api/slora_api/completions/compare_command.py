"""`slora compare`: sends one prompt to several models at the same time and prints their answers side by side."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import httpx

from slora_api.cli.output import print_json
from slora_api.cli.remote import CommandFailed, error_code, error_text, explained, tenant_client
from slora_api.completions.command import answer_path, prompt_fields

# Narrower columns are hard to read. If the columns would be narrower, the answers are printed one below the other.
_MIN_COLUMN_CHARS = 24
_GAP = " | "


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
        columns = [(str(_version(answer) or model), _text(answer)) for model, answer in named]
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


def _text(answer: httpx.Response) -> str:
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
