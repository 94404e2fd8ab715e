"""Sandboxes, inspections and downloads of an API: forked instead of started. The API is in the process of the tests,
or in that of a forked server.

A start of one imports for half a second. A process for each module and environment, a nest, has imported the module and
forks. The forked processes are children of this one, with the arguments, variables, descriptors and limits of a start.
A nest imports nothing that they do not, because their limits of memory count what a process has imported.
"""

import asyncio
import atexit
import gc
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any, NoReturn

from tests.support.forked_main import ForkedChild, become_subreaper, run_main, set_command_line

__all__ = ["VARIABLE", "start_child"]

_MODULES = (
    "slora_adapters.inspection.inspection_process",
    "slora_adapters.peft.hub",
    "slora_api.sandbox.grammar_process",
    "slora_api.sandbox.template_process",
)
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
_MAX_MESSAGE_BYTES = 1 << 17
# Servers that have this environment variable fork their sandboxes.
VARIABLE = "TESTS_FORK_SANDBOXES"
_start_program = asyncio.create_subprocess_exec
_lock = threading.Lock()


async def start_child(program: str, *arguments: str, **options: Any) -> Any:
    """Replaces `asyncio.create_subprocess_exec`."""
    if arguments[:2] != ("-P", "-m") or arguments[2] not in _MODULES:
        return await _start_program(program, *arguments, **options)
    loop = asyncio.get_running_loop()
    # A server must not pause for as long as the imports take.
    nest = await asyncio.to_thread(_start_nest, arguments[2], tuple(sorted(options["env"].items())))
    (reader, stdout), stdin, writer = os.pipe(), os.open(os.devnull, os.O_RDONLY), None
    if options["stdin"] == asyncio.subprocess.PIPE:
        os.close(stdin)
        stdin, writer = os.pipe()
    limits = [resource.getrlimit(kind) for kind in _LIMITS]
    message = json.dumps([limits, arguments[2:]]).encode()
    with _lock:
        become_subreaper(True)
        socket.send_fds(nest, [message], [stdin, stdout, 2])
        pid, _ = int(nest.recv(32)), nest.recv(1)
        become_subreaper(False)
    os.close(stdin)
    os.close(stdout)
    stream = asyncio.StreamReader(limit=options.get("limit", 1 << 16))
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
    )
    if writer is None:
        return ForkedChild(pid, None, stream)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(writer, "wb", buffering=0)
    )
    return ForkedChild(pid, asyncio.StreamWriter(transport, protocol, None, loop), stream)


@cache
def _start_nest(module: str, environment: tuple[tuple[str, str], ...]) -> socket.socket:
    """Returns the socket of a nest that is ready. It ends with this process."""
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import sys; sys.path[:] = sys.argv[2].split(':'); from tests.support.forked_sandboxes import main; main()"
    room = " " * 4_000  # Command lines are written over this. That of a nest does not name its module.
    with other:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(other.fileno()), ":".join(sys.path), room],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            pass_fds=[other.fileno()],
        )

    def end() -> None:
        control.close()
        process.wait()

    atexit.register(end)
    control.send(module.encode())
    control.recv(1)
    return control


def main() -> None:
    """Forks until the other end of the socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    module = control.recv(100).decode()
    importlib.import_module(module)
    del sys.modules[module]
    gc.freeze()
    control.send(b".")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
        if not message:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if pid := os.fork():
                control.send(str(pid).encode())
                os._exit(0)
            control.close()
            while os.getppid() == between:
                time.sleep(0.0002)
            _run(*json.loads(message), descriptors)
        os.waitpid(between, 0)
        control.send(b".")
        for descriptor in descriptors:
            os.close(descriptor)


def _run(limits: list[tuple[int, int]], command: list[str], descriptors: list[int]) -> NoReturn:
    for kind, limit in zip(_LIMITS, limits, strict=True):
        resource.setrlimit(kind, limit)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    set_command_line(sys.executable, "-P", "-m", *command)
    module, *sys.argv[1:] = command
    run_main(module)
