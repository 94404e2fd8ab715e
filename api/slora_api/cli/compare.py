"""`slora compare`: sends one prompt to several models and prints their answers side by side."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from slora_api.cli.complete import prompt_fields
from slora_api.cli.output import print_json
from slora_api.cli.remote import CommandFailed, check, explained, tenant_client

__all__ = ["compare"]

# Narrower columns are hard to read. If the columns would be narrower, the answers are printed one below the other.
_MIN_COLUMN_CHARS = 24
_GAP = " | "


@explained
def compare(arguments: argparse.Namespace) -> None:
    body = {"models": arguments.models, **prompt_fields(arguments)}
    with tenant_client() as client:
        found = check(client.post("/v1/fanout", json=body))
    answers = found["answers"]
    if arguments.json:
        print_json(found)
    else:
        print(_lay_out([(_heading(one), _text(one)) for one in answers], shutil.get_terminal_size().columns))
    if num_failed := sum(one["status_code"] >= 400 for one in answers):
        raise CommandFailed(f"{num_failed} of {len(answers)} answers failed")


def _heading(answer: dict[str, Any]) -> str:
    """Returns the version that answered, or the name of a model without versions."""
    return str(answer["headers"].get("x-slora-adapter", answer["model"]))


def _text(answer: dict[str, Any]) -> str:
    if answer["status_code"] >= 400:
        return f"error {answer['status_code']}: {answer['body']['error']['message']}"
    choice = answer["body"]["choices"][0]
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
