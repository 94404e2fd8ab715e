"""Runs a server program whose engine, loader and API workers are forked. A start of Python imports for seconds.

`ForkedModule` runs this module. Before the program starts a thread, its process forks a second one, the nursery, which
forks the children. They are the program's own child processes, with the arguments, variables and descriptors that it
gives them. Sandboxes start as always, because their limits of memory count what a process has imported.
"""

import asyncio
import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.support.engine_zygote import run_main

_MODULES = ("slora.engine.process", "slora_adapters.loader.loader_process", "slora_api.serve.api_process")
_IMPORTED_ONCE = (
    *_MODULES,
    "slora_adapters.store.file_store",
    "slora_adapters.store.redis_store",
    "slora_adapters.store.tiered_store",
    "slora_api.serve.main_process",
    "slora_api.serve.serve",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "tests.support.shared_files",
)
_MAX_MESSAGE_BYTES = 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
_start_program = asyncio.create_subprocess_exec
_libc = ctypes.CDLL(None, use_errno=True)


class _Child:
    """A forked child, with the part of asyncio's Process that the supervisor uses."""

    def __init__(self, pid: int, stdin: Any) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._has_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._note_end)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._has_ended.set()

    async def wait(self) -> int | None:
        await self._has_ended.wait()
        return self.returncode

    def terminate(self) -> None:
        self._send(15)

    def kill(self) -> None:
        self._send(9)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class _Nursery:
    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._control.close()
            _fork_children(other)
        other.close()

    async def start(self, program: str, *arguments: str, **options: Any) -> Any:
        """Replaces `asyncio.create_subprocess_exec`."""
        if arguments[:2] == ("-P", "-c"):
            # The server tries whether the sandboxes can import their modules.
            return await _start_program("true", **options)
        if arguments[:2] != ("-P", "-m") or arguments[2] not in _MODULES or "preexec_fn" in options:
            return await _start_program(program, *arguments, **options)
        reader, writer = os.pipe()
        passed = [int(number) for number in options["pass_fds"]]
        message = json.dumps([arguments[2:], options["env"], passed]).encode()
        assert len(message) <= _MAX_MESSAGE_BYTES
        # The kernel gives the child to this process when the process between them has ended.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        socket.send_fds(self._control, [message], [reader, options["stdout"], 2, *passed])
        pid, _ = int(self._control.recv(32)), self._control.recv(1)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        os.close(reader)
        return _Child(pid, os.fdopen(writer, "wb", buffering=0))


def _fork_children(control: socket.socket) -> NoReturn:
    """Forks until the other end of the socket is closed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # Otherwise, the output of the server would not end with the server.
    _set_command_line("nursery")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.setpgid(pid, pid)
                control.send(str(pid).encode())
                os._exit(0)
            control.close()
            _run_child(*json.loads(message), descriptors)
        os.waitpid(between, 0)
        control.send(b".")
        for descriptor in descriptors:
            os.close(descriptor)


def _run_child(
    command: list[str], environment: dict[str, str], passed: list[int], descriptors: list[int]
) -> NoReturn:
    numbers = [0, 1, 2, *passed]
    # A descriptor may have come with the number that another one gets.
    moved = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(*numbers, *descriptors) + 1) for descriptor in descriptors
    ]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    _set_command_line(sys.executable, "-P", "-m", *command)
    module, *sys.argv[1:] = command
    run_main(module)


def _set_command_line(*words: str) -> None:
    """Overwrites the command line of this process, by which tests find it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    raw = "\0".join(words).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, raw, len(raw))


if __name__ != "__main__":
    for _name in _IMPORTED_ONCE:
        importlib.import_module(_name)
    for _name in _MODULES:
        del sys.modules[_name]  # A child runs it as its main module.
else:
    _, _code, *_arguments = sys.argv
    asyncio.create_subprocess_exec = _Nursery().start  # type: ignore[assignment]
    gc.enable()
    sys.argv = ["-c", *_arguments]
    with suppress(KeyboardInterrupt):
        exec(compile(_code, "<program of a test>", "exec"), {"__name__": "__main__"})
