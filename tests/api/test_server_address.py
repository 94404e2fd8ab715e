import os
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from slora_api.cli.main import main
from slora_api.cli.remote import CommandFailed, server_url
from slora_api.core.data_dir import DataDirUnusable, open_data_dir
from slora_api.core.server_address import explain_service_links, is_loopback, open_listener, own_url
from slora_api.core.settings import explain_unknown_variables, read_settings
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine

LINKS = {
    "SLORA_PORT": "tcp://10.0.0.7:8000",
    "SLORA_SERVICE_HOST": "10.0.0.7",
    "SLORA_SERVICE_PORT": "8000",
    "SLORA_SERVICE_PORT_HTTP": "8000",
    "SLORA_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "SLORA_PORT_8000_TCP_ADDR": "10.0.0.7",
    "SLORA_REDIS_PORT": "tcp://10.0.0.8:6379",
}


@pytest.fixture(autouse=True)
def no_settings(set_variables: Callable[..., None], tmp_path: Path) -> Iterator[None]:
    names = [name for name in os.environ if name.startswith("SLORA_") or name.lower().endswith("_proxy")]
    set_variables(**dict.fromkeys(names))
    with chdir(tmp_path):
        yield


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", 8000, "http://127.0.0.1:8000"),
        ("0.0.0.0", 9300, "http://127.0.0.1:9300"),
        ("::", 9300, "http://[::1]:9300"),
        ("10.1.2.3", 80, "http://10.1.2.3:80"),
        ("fd00::5", 80, "http://[fd00::5]:80"),
    ],
)
def test_commands_ask_where_a_server_with_the_same_variables_listens(
    host: str, port: int, url: str, set_variables: Callable[..., None]
) -> None:
    assert own_url(host, port) == url
    set_variables(SLORA_HOST=host, SLORA_PORT=str(port))
    assert server_url() == url
    set_variables(SLORA_URL="http://elsewhere:1")
    assert server_url() == "http://elsewhere:1"


def test_variables_of_a_kubernetes_service_are_ignored_with_one_line(
    set_variables: Callable[..., None],
) -> None:
    assert read_settings({"model": "/"}, LINKS).port == 8000
    assert explain_unknown_variables(LINKS) == explain_service_links(LINKS)
    assert len(explain_service_links(LINKS)) == 1
    set_variables(**LINKS)
    assert server_url() == "http://127.0.0.1:8000"


def test_a_wrong_port_is_blamed_on_its_own_variable(
    set_variables: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    set_variables(SLORA_PORT="9300x")
    with pytest.raises(CommandFailed, match="SLORA_PORT"):
        server_url()
    assert main(["health"]) == 1
    said = capsys.readouterr().err
    assert "SLORA_PORT" in said and "SLORA_URL" not in said


def test_this_machine_is_never_asked_through_a_proxy(
    tmp_path: Path, set_variables: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        def log_message(self, *_: object) -> None:
            pass

    with (
        HTTPServer(("127.0.0.1", 0), Proxy) as proxy,
        running_platform(tmp_path, ScriptedEngine()) as platform,
    ):
        Thread(target=proxy.serve_forever, daemon=True).start()
        names = ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy")
        set_variables(**dict.fromkeys(names, f"http://127.0.0.1:{proxy.server_port}"))
        port = platform.url.rpartition(":")[2]
        for url in (platform.url, f"http://localhost:{port}"):
            set_variables(SLORA_URL=url)
            assert main(["health"]) == 0, capsys.readouterr().err
        set_variables(SLORA_URL=None, SLORA_PORT=port)
        assert main(["health"]) == 0 and not asked
        set_variables(SLORA_URL="http://slora.example:8000")
        assert main(["health"]) == 1 and asked == ["http://slora.example:8000/healthz"]
        proxy.shutdown()


@pytest.mark.parametrize(
    ("url", "is_own"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://LOCALHOST.:1", True),
        ("http://[::1]:8000", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://0.0.0.0:8000", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://[", False),
    ],
)
def test_urls_of_this_machine_are_known(url: str, is_own: bool) -> None:
    assert is_loopback(url) is is_own


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_server_on_all_ipv6_interfaces_answers_on_ipv4_as_well() -> None:
    with open_listener("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


def test_a_command_that_finds_no_server_names_the_one_that_runs(
    tmp_path: Path, set_variables: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        set_variables(SLORA_PORT=str(unused.getsockname()[1]))
        assert main(["health"]) == 1
        assert "SLORA_URL" in capsys.readouterr().err
        with open_data_dir(tmp_path / "data") as data:
            data.advertise("http://127.0.0.1:9300")
            assert main(["health"]) == 1
            assert "export SLORA_URL=http://127.0.0.1:9300" in capsys.readouterr().err
        assert main(["health"]) == 1
        assert "9300" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/proc/data", "No such file or directory"),
        ("a-file", "File exists"),
        ("a-file/data", "Not a directory"),
    ],
)
def test_a_data_directory_that_cannot_be_used_is_refused_with_a_remedy(path: str, reason: str) -> None:
    """Not even root can create a directory in /proc. The start printed no more than the text of the system call."""
    Path("a-file").touch()
    with pytest.raises(DataDirUnusable) as refused, open_data_dir(Path(path)):
        pass
    assert str(refused.value).startswith(f"--data-dir is {str(Path(path).resolve())!r}")
    assert reason in str(refused.value) and "Choose a directory" in str(refused.value)
