"""Messages of `slora` for wrong arguments. Subcommands are tested together with the server part that they call."""

import os
import subprocess
import sys

import pytest

from slora_api.cli.main import main


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        (["shout", "./my-adapter"], "./my-adapter\n"),
        (
            ["shout", "--nmae=a", "--tennat", "acme"],
            "--nmae=a --tennat acme; did you mean --name --tenant?\n",
        ),
        (["shout", "--xyz"], "--xyz\n"),
    ],
)
def test_arguments_that_a_subcommand_does_not_know_are_answered_with_its_own_usage(
    capsys: pytest.CaptureFixture[str], words: list[str], unknown: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["adapter", "push", *words])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "usage: slora adapter push" in told and "--name NAME" in told
    assert told.endswith(f"unrecognized arguments: {unknown}")


def test_a_reader_that_closes_the_pipe_ends_a_subcommand_without_a_traceback() -> None:
    code = """
import sys
import slora_api.operations.command
from slora_api.cli.declaration import command
from slora_api.cli.main import main
def print_lines(arguments):
    print("a line " * 100_000)
    return 0
print_lines.__module__ = "slora_api.operations.command"
command("health", None)(print_lines)
sys.exit(main(["health"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdout=closed,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=600,
        )
    assert (done.returncode, done.stderr) == (1, b"")
