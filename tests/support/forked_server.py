"""Runs a server program whose child processes are forked. A start of Python imports for seconds.

`ForkedModule` runs this module. Before the program starts a thread, its process forks a second one, the nursery, which
forks the children. They are the program's own child processes, with the arguments, variables and descriptors that it
gives them. The environment says whether its sandboxes are forked from processes that have imported less, see
`forked_sandboxes`, or start as always.
"""

import asyncio
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from tests.support.forked_main import ForkedChild, become_subreaper, run_main, set_command_line
from tests.support.forked_sandboxes import VARIABLE, start_child
from tests.support.slow_engine import heed_slowness

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
_start_program = asyncio.create_subprocess_exec


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
            start = start_child if VARIABLE in os.environ else _start_program
            return await start(program, *arguments, **options)
        reader, writer = os.pipe()
        passed = [int(number) for number in options["pass_fds"]]
        message = json.dumps([arguments[2:], options["env"], passed]).encode()
        assert len(message) <= _MAX_MESSAGE_BYTES
        become_subreaper(True)
        socket.send_fds(self._control, [message], [reader, options["stdout"], 2, *passed])
        pid, _ = int(self._control.recv(32)), self._control.recv(1)
        become_subreaper(False)
        os.close(reader)
        return ForkedChild(pid, os.fdopen(writer, "wb", buffering=0))


def _fork_children(control: socket.socket) -> NoReturn:
    """Forks until the other end of the socket is closed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # Otherwise, the output of the server would not end with the server.
    set_command_line("nursery")
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
    heed_slowness(os.environ)
    if VARIABLE in os.environ:
        asyncio.create_subprocess_exec = start_child
    os.environ.clear()
    os.environ.update(environment)
    set_command_line(sys.executable, "-P", "-m", *command)
    module, *sys.argv[1:] = command
    run_main(module)


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
