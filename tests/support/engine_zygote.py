"""A process that has imported the engine, and forks the engines of tests. Their start takes no seconds of imports.

It has no threads. For each message on its socket it forks a process that forks the engine and reports its end.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

__all__ = ["ForkedModule"]

_ENGINE = "slora.engine.process"
_MAX_MESSAGE_BYTES = 1 << 18


class ForkedModule:
    """A running `python -m module`, with the methods of a Popen. Its stdin and stdout are pipes.

    errors: the descriptor for its standard error.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str], errors: int, sources: str
    ) -> None:
        self.returncode: int | None = None
        (stdin, writer), (reader, stdout) = os.pipe(), os.pipe()
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps([module, arguments, dict(environment)]).encode()
        assert len(message) <= _MAX_MESSAGE_BYTES
        with status:
            socket.send_fds(_start_zygote(sources), [message], [stdin, stdout, errors, status.fileno()])
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(writer, "wb"), os.fdopen(reader, "rb")
        self.pid = int(self._status.recv(32))

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(BlockingIOError):
                self._note_end(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout_s)
            self._note_end()
        assert self.returncode is not None
        return self.returncode

    def _note_end(self, flags: int = 0) -> None:
        self.returncode = int(self._status.recv(32, flags))
        self._status.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _start_zygote(sources: str) -> socket.socket:
    """Returns the socket of this process's zygote, which ends with this process."""
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.engine_zygote", str(other.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
            pass_fds=[other.fileno()],
        )

    def end() -> None:
        control.close()
        process.wait()

    atexit.register(end)
    return control


def _serve(control: socket.socket) -> None:
    """Forks until the other end of the socket is closed. Returns in an engine's process, which then ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the processes that report ends.
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 4)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _run(*json.loads(message), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _run(module: str, arguments: list[str], environment: dict[str, str], *descriptors: int) -> None:
    *streams, status = descriptors
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        os.write(status, str(pid).encode())
        _, code = os.waitpid(pid, 0)
        os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
        os._exit(0)
    os.close(status)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _import_engine() -> None:
    gc.disable()
    importlib.import_module("numba")  # The engine imports it when it chooses its kernels.
    importlib.import_module(_ENGINE)
    del sys.modules[_ENGINE]  # It is run as the main module.
    gc.freeze()


if __name__ == "__main__":
    _import_engine()
    _serve(socket.socket(fileno=int(sys.argv[1])))
