"""The terminal is restored, however the view ends."""

import os
import pty
import select
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import pytest

from slora_api.metrics.top_command import Line, full_screen, show
from tests.api.served import READY_S, wait_until


@dataclass
class Terminal:
    """keyboard: what is written here is typed. stdin, stdout: what the program uses."""

    keyboard: int
    program: int
    stdin: TextIO
    stdout: TextIO

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pytest replaces both between the fixtures and the test, so the test has to call this."""
        monkeypatch.setattr(sys, "stdin", self.stdin)
        monkeypatch.setattr(sys, "stdout", self.stdout)

    def read_shown(self) -> str:
        """What was shown, up to the sequence that leaves the second screen."""
        text = ""
        while not text.endswith("\x1b[?1049l"):
            assert select.select([self.keyboard], [], [], READY_S)[0], text
            text += os.read(self.keyboard, 1 << 16).decode()
        return text


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    keyboard, program = pty.openpty()
    with (
        os.fdopen(os.dup(program), "r", encoding="utf-8") as stdin,
        os.fdopen(os.dup(program), "w", encoding="utf-8") as stdout,
    ):
        yield Terminal(keyboard, program, stdin, stdout)
        os.close(keyboard)
        # The thread that reads keys ends when the terminal is gone.
        wait_until(lambda: all(thread.name != "keys" for thread in threading.enumerate()))
    os.close(program)


def test_an_error_restores_the_terminal_and_the_signals(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    before, handlers = termios.tcgetattr(terminal.program), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), full_screen():
        assert termios.tcgetattr(terminal.program) != before
        show([Line("ab"), Line("cd", ((0, 1, "1"),))], has_color=True)
        raise ZeroDivisionError
    assert termios.tcgetattr(terminal.program) == before
    assert signal.getsignal(signal.SIGTERM) is handlers
    shown = terminal.read_shown()
    assert shown.startswith("\x1b[?1049h")
    # The terminal itself writes a further \r before each \n.
    assert "\x1b[H\x1b[Kab\r\r\n\x1b[K\x1b[1mc\x1b[0md\x1b[J" in shown


@pytest.mark.parametrize("ends", ["q", "SIGTERM"])
def test_a_key_or_a_signal_ends_the_view(
    terminal: Terminal, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.use(monkeypatch)
    with pytest.raises(KeyboardInterrupt), full_screen():
        if ends == "q":
            os.write(terminal.keyboard, b"xq")
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        # A signal that arrives just before a wait does not end the wait, so each wait is short, as in `slora top`.
        for _ in range(int(READY_S)):
            threading.Event().wait(1.0)
    assert terminal.read_shown()
