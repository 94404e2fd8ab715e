"""Runs a `slora` subcommand in the test process. A process of its own would take a second, most of it for imports."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from slora_api.cli.main import main
from tests.api.served import environment


@dataclass(frozen=True)
class Ended:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: str, **variables: str) -> Ended:
    """Runs `slora` with the given arguments and environment variables."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment(**variables), clear=True),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        code = main(arguments)
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def run_slora(url: str, *arguments: str, code: int = 0, **variables: str) -> str:
    """Runs `slora` against a server. Returns what it printed, or its errors if `code` is not 0.

    code: the expected exit code.
    """
    ended = run_command(*arguments, SLORA_URL=url, **variables)
    assert ended.returncode == code, ended.stderr
    return ended.stderr if code else ended.stdout
