"""A real Prometheus for tests: Debian's package `prometheus`, as a plain process.

Without it on the machine, tests that need it are skipped with the reason. In CI they fail instead.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.debian_package import skip_without

# Long, because a slow machine is not an error.
_DEADLINE_S = 120.0


def find_program(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    if found is None:
        skip_without(name, "prometheus")
    return found


@dataclass(frozen=True)
class PrometheusServer:
    client: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that match now, each with `metric` (labels) and `value` (time, text)."""
        answer = self.client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The series, as soon as there are any whose value is a number."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            found = [one for one in self.query(expression) if one["value"][1] != "NaN"]
            if found:
                return found
            assert time.monotonic() < deadline, f"no data: {expression}"
            time.sleep(0.1)


@contextmanager
def running_prometheus(config: Path) -> Iterator[PrometheusServer]:
    """Runs Prometheus with this configuration. Its data is in the same folder."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        find_program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={config.parent / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (
        (config.parent / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://{address}", verify=False) as client,
    ):
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while True:
                assert process.poll() is None and time.monotonic() < deadline, (
                    config.parent / "log"
                ).read_text(encoding="utf-8")
                try:
                    if client.get("/-/ready").is_success:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            yield PrometheusServer(client)
        finally:
            process.kill()
