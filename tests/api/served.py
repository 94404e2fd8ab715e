"""Runs `slora serve` as users do: as a separate process with engine and loader, on a free port, with a tiny model."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import openai
import psutil
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tests.api.platform import bearer, make_sdk_client
from tests.support.child_processes import find_children
from tests.support.engine_stack import SOURCES
from tests.support.engine_zygote import ForkedModule
from tests.support.forked_program import ForkedProgram
from tests.support.forked_sandboxes import VARIABLE as FORK_SANDBOXES
from tests.support.peft_adapters import make_adapter
from tests.support.slow_engine import VARIABLE as SLOW_ENGINE
from tests.support.slow_engine import slowed
from tests.support.tiny_models import make_model, write_model

ADMIN_KEY = "the-operators-own-key"
# The longest that a test waits. A start on a busy machine that has to compile numba's kernels takes minutes.
READY_S = 600
_PYTHON = (sys.executable, "-P", "-c")
# The console script, usable without an installation.
SLORA = (*_PYTHON, "from slora_api.cli.main import main; raise SystemExit(main())")
# One token for each printable character, and an end token. The text therefore shows exactly which tokens were
# generated.
CHARACTERS = "".join(map(chr, range(32, 127)))
EOS = len(CHARACTERS)
_SIZES = {"vocab_size": EOS + 1, "num_hidden_layers": 2, "eos_token_id": EOS}
T = TypeVar("T")
_TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def write_base(directory: Path, model: str = "llama") -> None:
    """A tiny random model with a chat template and a tokenizer of one token per character."""
    write_model(directory, model, **_SIZES)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with one token per character, followed by the end token."""
    vocabulary = {("Ġ" if character == " " else character): at for at, character in enumerate(CHARACTERS)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    fast.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": "<eos>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_adapter(directory: Path, *, seed: int, model: str = "llama", **lora: object) -> Path:
    """An adapter of the tiny model, saved by peft."""
    make_adapter(directory, make_model(model, **_SIZES), seed=seed, std=0.15, **{"r": 4, **lora})
    return directory


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process, without variables that tests or developers set for themselves."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLORA_", "TRITON_", "OPENAI_"))
    }
    return kept | {"OMP_NUM_THREADS": "1"} | variables


@dataclass
class Served:
    """A running server. `lines`: its standard output so far."""

    process: subprocess.Popen[str] | ForkedProgram | ForkedModule
    data_dir: Path
    lines: list[str] = field(default_factory=list)
    sdk_clients: ExitStack = field(default_factory=ExitStack)

    def slowed(self) -> AbstractContextManager[None]:
        """Slows the engines down, so that a long stream that begins in the context does not end in it."""
        return slowed(_find_slow_file(self.data_dir))

    @property
    def url(self) -> str:
        line = self.wait_for_line("listening on ")
        return line.split("listening on ")[1].split(";")[0]

    def wait_for_line(self, text: str) -> str:
        """The first printed line that contains `text`."""
        return wait_for(lambda: next((line for line in list(self.lines) if text in line), None), self.alive)

    def alive(self) -> None:
        assert self.process.poll() is None, (
            f"the server ended with code {self.process.returncode}: {self.lines}"
        )

    def wait_until_ready(self) -> None:
        # The first time, the line saves many requests. Later the line is there, and says nothing about a new engine.
        self.wait_for_line("slora: ready;")
        with httpx.Client(base_url=self.url, verify=False) as client:
            wait_for(lambda: client.get("/readyz").status_code == 200 or None, self.alive)

    def client(self, key: str) -> httpx.Client:
        # Loading CA certificates takes longer than most requests of these tests, and the tests use no TLS.
        return httpx.Client(base_url=self.url, headers=bearer(key), timeout=READY_S, verify=False)

    def sdk(self, key: str) -> openai.OpenAI:
        """A client of the openai package, closed when the server is stopped."""
        return self.sdk_clients.enter_context(make_sdk_client(self.url, key))

    def make_key(self, tenant: str, adapter: str | None = None, *, admin_key: str = ADMIN_KEY) -> str:
        """Creates a key through the admin routes, and the tenant if it does not exist."""
        with self.client(admin_key) as admin:
            admin.post("/admin/tenants", json={"name": tenant})
            body = {} if adapter is None else {"adapter": adapter}
            key: str = admin.post(f"/admin/tenants/{tenant}/keys", json=body).raise_for_status().json()["key"]
        return key

    def metrics(self) -> dict[str, float]:
        """Each series, such as `slora_pages{state="held"}`, with its value."""
        with self.client(ADMIN_KEY) as operator:
            return parse_metrics(operator.get("/metrics").raise_for_status().text)

    def metric(self, name: str) -> float | None:
        """The value of a series, or the sum of all series of a metric. None if there is none, as without an engine."""
        return sum_series(self.metrics(), name)

    def wait_for_metric(self, name: str, value: float) -> None:
        wait_for(lambda: self.metric(name) == value or None, self.alive)

    def child(self, module: str) -> psutil.Process:
        """The child process that runs `module`. Raises StopIteration if there is none."""
        return next(iter(find_children(module, self.process.pid, recursive=True)))

    def kill_everything(self) -> None:
        """Sends SIGKILL to the children first, then to the server, so that no process can complete any work."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for process in (*children, self.process):
            os.kill(process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(children, timeout=READY_S)


def parse_metrics(text: str) -> dict[str, float]:
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, value in pairs}


def sum_series(metrics: Mapping[str, float], name: str) -> float | None:
    values = [value for series, value in metrics.items() if name in (series, series.partition("{")[0])]
    return sum(values) if values else None


def wait_for(find: Callable[[], T | None], check: Callable[[], None] = lambda: None) -> T:
    """Calls `find` until its result is not None, and returns the result."""
    began = time.monotonic()
    while (found := find()) is None:
        check()
        waited_s = time.monotonic() - began
        assert waited_s < READY_S, f"it did not happen within {READY_S} s"
        # Most calls are requests, and the server answers them on the cores that it starts on.
        time.sleep(min(0.2, 0.01 + waited_s / 10))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(lambda: condition() or None)


def ask_and_leave(client: httpx.Client, path: str, has_begun: Callable[[], bool], **content: Any) -> None:
    """Sends a POST request, and closes its connection when `has_begun()`.

    A client that leaves after a fixed time may be too early on a busy machine.
    """
    request = client.build_request("POST", path, **content)
    place = client.base_url
    with closing(HTTPConnection(place.host, place.port, timeout=READY_S)) as connection:
        connection.request("POST", path, request.read(), dict(request.headers))
        wait_until(has_begun)


@contextmanager
def serving(
    model: Path,
    data_dir: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    kernels: str = "auto",
    command: Sequence[str] = SLORA,
    forks: bool = True,
) -> Iterator[Served]:
    """Starts `slora serve` on the tiny model. At the end, stops it with SIGTERM if it still runs.

    command: the command line of `slora`.
    forks: see `running`.
    """
    chosen = ["--port", "0", "--data-dir", str(data_dir), "--device", "cpu", "--model", str(model)]
    chosen += ["--pool-bytes", "8MiB", "--host-cache-bytes", "16MiB", "--kernels", kernels]
    variables = environment(SLORA_ADMIN_KEY=ADMIN_KEY) if env is None else env
    variables = {**variables, SLOW_ENGINE: str(_find_slow_file(data_dir))}
    if command is SLORA:  # Programs of tests see what their server starts.
        variables[FORK_SANDBOXES] = ""
    with running([*command, "serve", *chosen, *flags], variables, data_dir, forks=forks) as served:
        yield served


def _find_slow_file(data_dir: Path) -> Path:
    return data_dir.with_name(f"{data_dir.name}-slow")


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], data_dir: Path, *, forks: bool = False
) -> Iterator[Served]:
    """Starts a server command. Prints its log if the test fails.

    A Python program is forked from a process that has imported the server.
    forks: its engine, loader and API workers are forked, too. Otherwise they start as always, which takes seconds.
    """
    process: subprocess.Popen[str] | ForkedProgram | ForkedModule
    if forks and tuple(command[:3]) == _PYTHON:
        process = ForkedModule(
            "tests.support.forked_server", *command[3:], environment=env, errors=2, sources=SOURCES
        )
        process.stdin.close()
        output = io.TextIOWrapper(process.stdout, encoding="utf-8")
    elif tuple(command[:3]) == _PYTHON:
        process = ForkedProgram(*command[3:], environment=env, stderr=2)
        output = process.output
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(env), encoding="utf-8")
        assert process.stdout is not None
        output = process.stdout
    served = Served(process, data_dir)
    reader = threading.Thread(target=_read_lines, args=(output, served.lines))
    reader.start()
    try:
        with served.sdk_clients:
            yield served
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join()
        output.close()


def _read_lines(output: IO[str], lines: list[str]) -> None:
    for line in output:
        lines.append(line.rstrip("\n"))
