"""A process that has imported the engine, and forks the engines of tests. Their start takes no seconds of imports.

It has no threads. For each message on its socket it forks a process that forks the engine and reports its end. Other
modules are imported when the first of their processes is started. It also loads each model once, see `_load_model`.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from slora.core.engine_config import EngineConfig
from slora.models.collectives import ALONE
from slora.models.model import load_model
from slora.models.model_spec import read_model_spec
from slora.runner.model_part import ModelPart
from tests.support.forked_main import run_main
from tests.support.slow_engine import heed_slowness

__all__ = ["ForkedModule", "start_zygote"]

_ENGINE = "slora.engine.process"
_MAX_MESSAGE_BYTES = 1 << 18
# The longest that a test waits for the end of a module.
_WAIT_S = 120.0
# The command lines of forked processes are written over that of this one.
_MAX_COMMAND_BYTES = 16_000


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
            socket.send_fds(start_zygote(sources), [message], [stdin, stdout, errors, status.fileno()])
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(writer, "wb"), os.fdopen(reader, "rb")
        self.pid = int(self._status.recv(32))

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(BlockingIOError):
                self._note_end(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self, timeout_s: float = _WAIT_S) -> int:
        """Waits for the end, and returns the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._status.settimeout(timeout_s)
            try:
                self._note_end()
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked module", timeout_s) from None
        assert self.returncode is not None
        return self.returncode

    def _note_end(self, flags: int = 0) -> None:
        self.returncode = int(self._status.recv(32, flags))
        self._status.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def start_zygote(sources: str) -> socket.socket:
    """Returns the socket of this process's zygote, which ends with this process.

    Processes that are forked from this one share its zygote, and it ends with the last of them.
    """
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "tests.support.engine_zygote",
                str(other.fileno()),
                " " * _MAX_COMMAND_BYTES,
            ],
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
    """Forks until the other end of the socket is closed."""
    signal.signal(signal.SIGCHLD, _reap)
    imported = set[str]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 4)
        if not message:
            return
        module, arguments, environment = json.loads(message)
        if module not in imported:
            _import_main(module)
            imported.add(module)
        if (engine := _find_engine(arguments)) is not None:
            _load_model(*engine)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _run(module, arguments, environment, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(*_: object) -> None:
    """Reaps the processes that report ends. Unlike the kernel's reaping, this counts their CPU time."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run(module: str, arguments: list[str], environment: dict[str, str], *descriptors: int) -> NoReturn:
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
    # The streams of the process that was forked belong to files that it may seek in.
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    heed_slowness(environment)
    run_main(module)


def _import_main(module: str) -> None:
    """Imports a module that forked processes run as their main module."""
    importlib.import_module(module)
    del sys.modules[module]
    gc.freeze()


def _find_engine(arguments: list[str]) -> tuple[str, str, str] | None:
    """The model, the dtype and the kernels of a server or of an engine."""
    value = dict(pairwise(arguments))
    if "--config" in value:
        engine = json.loads(value["--config"]).get("engine", {})
        chosen = [engine.get(name) for name in ("model", "dtype", "kernels")]
    else:
        chosen = [value.get(name) for name in ("--model", "--dtype", "--kernels")]
    model, dtype, kernels = chosen
    return None if model is None else (model, dtype or "auto", kernels or "auto")


@cache
def _load_model(directory: str, dtype: str, kernels: str) -> None:
    """For each shape of a weight, an engine tries which blocks of rows it multiplies. A process does so once, and those
    that are forked from it inherit the result. They also inherit the CPU kernels that are loaded here."""
    tqdm.monitor_interval = 0  # Its thread would not be forked.
    with suppress(Exception):  # The engine reports what is wrong.
        config = EngineConfig(Path(directory), device="cpu", dtype=dtype, kernels=kernels)
        part = ModelPart(config, read_model_spec(config.model), load_model, ALONE)
        part.kernels.warm_up(part.geometry)
        part.model.warm_up(part.kernels)
    assert threading.active_count() == 1


if __name__ == "__main__":
    gc.disable()
    importlib.import_module("numba")  # The engine imports it when it chooses its kernels.
    _import_main(_ENGINE)
    _serve(socket.socket(fileno=int(sys.argv[1])))
