"""Messages of `slora` for wrong arguments. Subcommands are tested together with the server part that they call."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from slora_api.cli.main import main
from tests.adapters.hand_made import make_members, write_directory
from tests.api.command import run_command
from tests.api.platform import Platform
from tests.support.terminal import Terminal


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


def test_a_push_shows_its_progress_on_a_terminal_only(
    platform: Platform, tmp_path: Path, set_variables: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_variables(SLORA_URL=platform.url, SLORA_API_KEY=platform.key("acme"))
    directory = write_directory(tmp_path / "greeter", make_members())
    for stderr, is_shown in ((io.StringIO(), False), (Terminal(), True)):
        with redirect_stderr(stderr):
            assert main(["adapter", "push", str(directory)]) == 0
        assert ("Uploading" in stderr.getvalue()) == is_shown
        assert "greeter@1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "name"), [("Llama-3.2_SQL.LoRA", "llama-3.2_sql.lora"), ("_Größe (final) ", "groe-final")]
)
def test_a_folder_whose_name_is_not_valid_is_pushed_under_a_name_like_it(
    platform: Platform, tmp_path: Path, folder: str, name: str
) -> None:
    variables = {"SLORA_URL": platform.url, "SLORA_API_KEY": platform.key("acme")}
    directory = write_directory(tmp_path / folder, make_members() | {"notes.bin": b"x", "README.md": b"x"})
    shown = run_command("adapter", "push", str(directory), **variables)
    assert f"{name}@1" in shown.stdout and f"The adapter is named {name}, because" in shown.stderr
    assert "Not sent, because adapters have no such files: notes.bin\n" in shown.stderr
    refused = run_command("adapter", "push", str(directory), "--name", folder, **variables)
    assert refused.returncode == 1 and f"; '{name}' would be valid" in refused.stderr
