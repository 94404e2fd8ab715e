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
