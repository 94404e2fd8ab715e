"""The server under attack: `slora demo` as users run it, with two of the demo's adapters and a longer context.

The server runs with the recorder of slow event-loop callbacks, so that a row can tell a stall from a busy machine.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.api.platform import FIELDS, bearer
from tests.api.served import ADMIN_KEY, Served, environment, running

__all__ = ["CONTEXT", "ROOT", "Limits", "Target", "adapter_files", "attacked_server"]

ROOT = Path(__file__).parents[2]
CONTEXT = 4096
BOUND_MS = 5.0
_ADAPTERS = ("upper", "reverse")
_PATIENCE_S = 55.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How the server is started. flags: `{folder}` stands for the folder of this server's files.

    descriptors: its soft limit. small_disk: whether the data directory has a disk of 64 MiB of its own.
    """

    flags: Sequence[str] = ()
    descriptors: int | None = None
    small_disk: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """served: the process. command, environment: it was started with. folder: of all its files."""

    served: Served
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path

    @property
    def slow_file(self) -> Path:
        """The recorder's."""
        return self.folder / "slow.jsonl"

    @property
    def log(self) -> Path:
        """What the server writes to stderr."""
        return self.folder / "log"

    @property
    def url(self) -> str:
        return self.served.url

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def key(self, tenant: str, adapter: str | None = None) -> str:
        """A new key of a tenant, which is made if need be."""
        return self.served.make_key(tenant, adapter)

    def client(self, key: str, timeout: float = _PATIENCE_S) -> httpx.Client:
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(
            base_url=self.url, headers=bearer(key), timeout=timeout, verify=False, limits=limits
        )

    def admin(self) -> httpx.Client:
        return self.client(ADMIN_KEY)

    def complete(self, key: str, timeout: float = _PATIENCE_S, **fields: object) -> httpx.Response:
        body = {"model": "default", "prompt": "the quick brown fox", "max_tokens": 4} | fields
        return self.post(key, "/v1/completions", body, timeout)

    def chat(self, key: str, model: str, timeout: float = _PATIENCE_S, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": "the quick brown fox"}]
        body = {"model": model, "messages": messages, "max_tokens": 4} | fields
        return self.post(key, "/v1/chat/completions", body, timeout)

    def post(self, key: str, path: str, body: object, timeout: float = _PATIENCE_S) -> httpx.Response:
        with self.client(key, timeout) as client:
            return client.post(
                path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
            )

    def upload(self, key: str, name: str, files: Mapping[str, bytes]) -> httpx.Response:
        parts = {FIELDS.get(file, file): (file, raw) for file, raw in files.items()}
        with self.client(key) as client:
            return client.post("/v1/adapters", data={"name": name}, files=parts)


def adapter_files(alpha: float = 4, **extras: str | bytes) -> dict[str, bytes]:
    """An adapter of the demo model. Another alpha makes another version. extras: file names with `_` for the dot."""
    folder = ROOT / "demo" / "adapters" / "upper"
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")) | {"lora_alpha": alpha}
    weights = (folder / "adapter_model.safetensors").read_bytes()
    names = {"chat_template": "chat_template.jinja", "generation_config": "generation_config.json"}
    texts = {names[name]: text.encode() if isinstance(text, str) else text for name, text in extras.items()}
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": weights,
        **texts,
    }


@contextmanager
def attacked_server(folder: Path, sources: Path, limits: Limits) -> Iterator[Target]:
    """Starts the server of the checkout `sources`, and waits until it is ready; files lie in `folder`."""
    demo = folder / "demo"
    shutil.copytree(ROOT / "demo" / "model", demo / "model")
    config_file = demo / "model" / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) | {"max_position_embeddings": CONTEXT}
    config_file.write_text(json.dumps(config), encoding="utf-8")
    for name in _ADAPTERS:
        shutil.copytree(ROOT / "demo" / "adapters" / name, demo / "adapters" / name)
    data_dir = folder / "data"
    command = [*server_command(sources, folder / "slow.jsonl"), "demo", str(demo), "--port", "0"]
    command += ["--data-dir", str(data_dir), "--device", "cpu", "--pool-bytes", "256MiB"]
    command += [flag.format(folder=folder) for flag in limits.flags]
    command, variables = in_shell(command, folder / "log", limits), server_environment(sources)
    disk = small_disk(data_dir) if limits.small_disk else nullcontext()
    with disk, running(command, variables, data_dir) as served:
        target = Target(served, command, variables, folder)
        served.wait_for_line("slora: ready")
        yield target


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A filesystem of 64 MiB at `folder`. Needs the right to mount."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def server_command(sources: Path, slow_file: Path) -> list[str]:
    """`slora` of that checkout with this checkout's recorder."""
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); "
        "from tests.support.recorded_slora import run; raise SystemExit(run())"
    )
    python = sources / ".venv" / "bin" / "python"
    chosen = str(python) if python.exists() else sys.executable
    return [chosen, "-P", "-c", code, str(slow_file), str(BOUND_MS)]


def server_environment(sources: Path) -> dict[str, str]:
    paths = [str(sources / folder) for folder in (".", "kernels", "adapters", "api")]
    return environment(SLORA_ADMIN_KEY=ADMIN_KEY, PYTHONPATH=os.pathsep.join(paths))


def in_shell(command: Sequence[str], log: Path, limits: Limits) -> list[str]:
    """The command with its stderr in a file, and with the limit on descriptors."""
    limit = f"ulimit -Sn {limits.descriptors}; " if limits.descriptors is not None else ""
    return ["sh", "-c", f'{limit}exec "$@" 2>>"$0"', str(log), *command]
