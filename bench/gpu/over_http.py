"""Tokens per second of streams over HTTP, from clients on the same machine: `slora serve` with a random model.

All streams of a case start at once and have the same lengths. The clients are processes of their own, so that one
Python process is not what is measured. Imports neither torch nor the server, whose packages the machine may lack.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from bench.sse_client import SseClient
from bench.table import Row

_ADMIN_KEY = "the-operators-own-key"
_START_S = 120.0
_CLIENTS = 4
_WARM_TOKENS = 16


class Server:
    """A running server, with an API key for each tenant."""

    def __init__(self, url: str, num_adapters: int) -> None:
        self.url = url
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {_ADMIN_KEY}"}, timeout=60.0, verify=False
        ) as admin:
            self.keys = [self._make_key(admin, f"tenant-{number}") for number in range(max(1, num_adapters))]
            models = admin.get("/v1/models", headers={"Authorization": f"Bearer {self.keys[0]}"})
            self.base: str = models.raise_for_status().json()["data"][0]["id"]

    @staticmethod
    def _make_key(admin: httpx.Client, tenant: str) -> str:
        admin.post("/admin/tenants", json={"name": tenant})
        made = admin.post(f"/admin/tenants/{tenant}/keys", json={})
        key: str = made.raise_for_status().json()["key"]
        return key

    def stream(self, prompts: Sequence[list[int]], num_adapters: int, output_tokens: int) -> Row:
        """Sends all requests at once, in turn for the adapters; 0 is the base model."""
        asked = []
        for number, prompt in enumerate(prompts):
            tenant = number % num_adapters if num_adapters else 0
            body = {
                "model": "adapter" if num_adapters else self.base,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            asked.append((self.keys[tenant], body))
        parts = [asked[first::_CLIENTS] for first in range(min(_CLIENTS, len(asked)))]
        clients = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "bench.gpu.over_http"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
            for _ in parts
        ]
        try:
            for client, part in zip(clients, parts, strict=True):
                assert client.stdin is not None
                client.stdin.write(json.dumps({"url": self.url, "asked": part}) + "\n")
                client.stdin.flush()
            for client in clients:  # Each has opened its connections.
                assert client.stdout is not None
                client.stdout.readline()
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            answers = [answer for client in clients for answer in json.loads(client.communicate()[0])]
        finally:
            for client in clients:
                client.kill()
                client.wait()
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise RuntimeError(f"{len(errors)} streams failed: {errors[0]}")
        seconds = max(answer["end"] for answer in answers) - min(answer["sent"] for answer in answers)
        ttfts = sorted(answer["first"] - answer["sent"] for answer in answers)
        tokens = sum(answer["tokens"] for answer in answers)
        return {
            "tokens/s": tokens / seconds,
            "seconds": seconds,
            "p50 TTFT ms": 1e3 * ttfts[len(ttfts) // 2],
            "max TTFT ms": 1e3 * ttfts[-1],
            "chunks": sum(answer["chunks"] for answer in answers),
            "tokens": tokens,
        }


@contextmanager
def serving(scale: str, num_adapters: int, flags: Sequence[str]) -> Iterator[Server]:
    """Starts the server, and waits until it is ready. The model and the adapters lie in memory, if there is a tmpfs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="slora-served-", dir=memory if memory.is_dir() else None
    ) as folder:
        command = [
            sys.executable,
            "-P",
            "-m",
            "bench.gpu.random_server",
            "--scale",
            scale,
            "--adapters",
            str(num_adapters),
        ]
        command += ["--folder", str(Path(folder) / "served"), "--", "--port", "0", *flags]
        # A copy of the sources is not installed, but the server reads the version of its package.
        about = Path(folder) / "site" / "slora-0.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text("Metadata-Version: 2.1\nName: slora\nVersion: 0\n", encoding="utf-8")
        path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(about.parents[1])))
        environment = os.environ | {"SLORA_ADMIN_KEY": _ADMIN_KEY, "PYTHONPATH": path}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
        )
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                if "listening on " in line:
                    url = line.split("listening on ")[1].split(";")[0].strip()
                if "slora: ready;" in line:
                    break
            else:
                raise RuntimeError(f"the server ended with code {process.wait()}")
            yield Server(url, num_adapters)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
            process.kill()
            process.wait()


def client_main() -> None:
    """A client: reads what to ask, opens the connections, waits for a line, and prints the times of all answers."""
    wanted = json.loads(sys.stdin.readline())
    print(json.dumps(asyncio.run(_ask_all(wanted["url"], wanted["asked"]))))


async def _ask_all(url: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Row]:
    async with SseClient(url) as client:
        await client.connect(len(asked))
        print("connected", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        answers = await asyncio.gather(*(client.complete(key, body) for key, body in asked))
    # `perf_counter` is the same clock for all processes of a machine.
    return [
        {
            "sent": answer.sent_at,
            "first": answer.chunks_at[0] if answer.chunks_at else answer.sent_at,
            "end": answer.chunks_at[-1] if answer.chunks_at else time.perf_counter(),
            "chunks": len(answer.chunks_at),
            "tokens": answer.num_tokens,
            "error": answer.error,
        }
        for answer in answers
    ]


if __name__ == "__main__":
    client_main()
