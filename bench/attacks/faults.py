"""What is no tenant's doing: processes that hang, a full disk; and small things that an outsider stumbles over."""

import gzip
import json
import os
import signal
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil

from bench.attacks.answers import seconds_until, sent
from bench.attacks.target import Limits, Target
from tests.api.served import Served, running

__all__ = ["OWN_STORE", "SMALL_DISK", "full_disk", "hung_processes", "small_things"]

OWN_STORE = Limits(("--store", "{folder}/store"))
SMALL_DISK = Limits(small_disk=True)

_CHILDREN = {"engine": "slora.engine.process", "loader": "slora_adapters.loader.loader_process"}
_HUNG_S = 20.0


def _pid(served: Served, module: str) -> int | None:
    try:
        return int(served.child(module).pid)
    except (StopIteration, psutil.Error):
        return None


def _ready(target: Target) -> bool:
    try:
        return httpx.get(target.url + "/readyz", verify=False, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def hung_processes(target: Target) -> Callable[[], str]:
    key = target.key("mallory")

    def hang(name: str) -> str:
        module = _CHILDREN[name]
        pid = _pid(target.served, module)
        if pid is None:
            return f"{name}: there is no such process"
        os.kill(pid, signal.SIGSTOP)
        try:
            # An engine proves nothing without work.
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(sent, partial(target.complete, key, _HUNG_S / 2, max_tokens=8))
                unready_s = seconds_until(lambda: not _ready(target), _HUNG_S / 2)
            back_s = seconds_until(
                lambda: _pid(target.served, module) not in (pid, None) and _ready(target), _HUNG_S / 2
            )
        finally:
            if _pid(target.served, module) == pid:
                os.kill(pid, signal.SIGCONT)
        said = "never" if unready_s is None else f"after {unready_s} s"
        back = f"not restarted within {_HUNG_S:.0f} s" if back_s is None else f"restarted {back_s} s later"
        return f"{name}: a request: {answer.result()[:120]}; /readyz fails {said}; {back}"

    return lambda: "; ".join(hang(name) for name in _CHILDREN)


def fill(folder: Path) -> None:
    """Takes all the room that is left."""
    file = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 1 << 12, 1):
        with suppress(OSError):
            while True:
                os.write(file, bytes(size))
    os.close(file)


def full_disk(target: Target) -> Callable[[], str]:
    """Revokes a key when the disk of the data directory is full, then starts the server again."""

    def run() -> str:
        with target.admin() as admin:
            made = admin.post("/admin/tenants/upper/keys", json={"adapter": "upper"}).json()
            fill(target.served.data_dir)
            revoked = sent(partial(admin.delete, f"/admin/keys/{made['key_id']}"))
        used = sent(partial(target.complete, made["key"]))
        target.served.process.terminate()
        target.served.process.wait(40)
        with running(target.command, target.environment, target.served.data_dir) as again:
            listens = seconds_until(
                lambda: again.process.poll() is not None or any("listening" in line for line in again.lines),
                20.0,
            )
            code = again.process.poll()
        last = target.log.read_text(encoding="utf-8").splitlines()[-1][:160]
        start = f"ends with code {code}: {last}" if code is not None else f"listens after {listens} s"
        return f"revocation: {revoked}; the revoked key: {used}; a start on the full disk {start}"

    return run


def small_things(target: Target) -> Callable[[], str]:
    """A key of an adapter called `default`, a compressed body, and the mode of the store's folder."""

    def run() -> str:
        key = target.key("mallory")
        with target.admin() as admin:
            made = sent(partial(admin.post, "/admin/tenants/mallory/keys", json={"adapter": "default"}))
        body = gzip.compress(json.dumps({"model": "default", "prompt": "a", "max_tokens": 1}).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        with target.client(key) as client:
            encoded = sent(partial(client.post, "/v1/completions", content=body, headers=headers))
        store = target.folder / "store"
        mode = stat.filemode(store.stat().st_mode) if store.exists() else "missing"
        return f"key of `default`: {made}; gzip: {encoded}; --store: {mode}"

    return run
