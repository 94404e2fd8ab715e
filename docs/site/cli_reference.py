"""The page of all subcommands of `slora`, from the parser of the command line."""

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

from slora_api.cli.main import make_parser

# Their flags are the settings, which have a page of their own.
_WITH_SETTINGS = ("slora serve", "slora demo", "slora doctor")
_SETTINGS = "Its flags are the [settings](settings.md)."


def make_page() -> str:
    with patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}):
        parser = make_parser()
        parts = ["# Commands", _sentence(parser.description), "```text", parser.epilog.strip(), "```"]
        parts.append(
            "The exit code is 0 for success, 1 for a failure with its reason, and 2 for wrong usage."
        )
        for group in _subparsers(parser):
            parts += [f"## {group.prog}", _sentence(group.description)]
            commands = list(_subparsers(group))
            for command in commands:
                parts += [f"### {command.prog}", _sentence(command.description), *_describe(command)]
            if not commands:
                parts += _describe(group)
    return "\n\n".join(parts).replace("```text\n\n", "```text\n").replace("\n\n```\n", "\n```\n")


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _describe(command: argparse.ArgumentParser) -> Iterator[str]:
    if command.prog in _WITH_SETTINGS:
        yield _SETTINGS
        return
    yield f"```text\n{command.format_usage().removeprefix('usage: ').strip()}\n```"
    rows = [
        f"| {_name(action)} | {_escape(_sentence(action.help or ''))} |"
        for action in command._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows])
    if command.epilog:
        yield _escape(command.epilog)


def _name(action: argparse.Action) -> str:
    metavar = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest
    )
    takes_value = action.nargs != 0
    flags = action.option_strings
    text = (", ".join(flags) + (f" {metavar}" if takes_value else "")) if flags else str(metavar)
    return "`" + text + "`"


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return text and text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("%%", "%")
