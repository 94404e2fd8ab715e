import logging
import resource
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from slora_api.http.http_server import fit_connections
from tests.api.conftest import Kit
from tests.api.http.test_acceptor import connect
from tests.api.served import SLORA, serving
from tests.support.forked_program import ForkedProgram

SCRIPT = """
import resource
from slora_api.http.http_server import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    """Born from a bug: a server started with a soft limit of 256 accepted no more than 256 connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert ForkedProgram(SCRIPT).finish() == (0, f"{hard} {hard} {hard}\n")


@pytest.mark.parametrize(("descriptors", "connections"), [(20_000, 4096), (1024, 896), (256, 128), (64, 32)])
def test_connections_leave_descriptors_for_the_rest_of_the_server(
    descriptors: int, connections: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit_connections(4096, descriptors) == connections
    assert ("ulimit -Hn" in caplog.text) == (connections < 4096)


@pytest.mark.soak
def test_a_server_with_few_descriptors_answers_beside_hundreds_of_idle_connections(
    kit: Kit, tmp_path: Path
) -> None:
    """Born from a bug: /healthz was unreachable for 135 s, and the log grew by 264 MB."""
    log = tmp_path / "log"
    limited = ("bash", "-c", f'ulimit -n 256; exec "$@" 2> {log}', "bash", *SLORA)
    with serving(kit.base, tmp_path / "data", command=limited) as served, ExitStack() as stack:
        served.wait_until_ready()
        for _ in range(400):
            connect(served.url, stack)
        for _ in range(20):
            assert httpx.get(served.url + "/healthz").status_code == 200
    assert log.stat().st_size < 10_000
