"""What the server sends to a browser that opens the console."""

import hashlib
import json
import re
import socket
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.api.platform import Platform

_FILES = Path(str(files("slora_api.console"))) / "static"
_MAX_BYTES = 300_000
_NUM_IDLE = 60


def get(platform: Platform, path: str, **headers: str) -> httpx.Response:
    return httpx.get(platform.url + path, headers=headers, verify=False)


def test_the_root_sends_browsers_to_the_console_and_tells_others_what_the_server_is(
    platform: Platform,
) -> None:
    browser = get(platform, "/", Accept="text/html,application/xhtml+xml")
    assert (browser.status_code, browser.headers["location"]) == (307, "console")
    other = get(platform, "/", Accept="*/*")
    assert other.status_code == 200 and other.headers["content-type"].startswith("text/plain")
    assert f"{platform.url}/console" in other.text and f"{platform.url}/docs" in other.text


def test_the_page_runs_only_scripts_of_its_own_server(platform: Platform) -> None:
    page = get(platform, "/console")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in page.headers


def test_the_reference_loads_only_files_of_its_own_server(platform: Platform) -> None:
    page = get(platform, "/docs")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    for reference in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert "//" not in reference and get(platform, f"/{reference}").status_code == 200


def test_no_number_touches_the_word_before_it() -> None:
    """The templates drop spaces that contain a line break, also between a word and an expression."""
    joined = re.compile(r"^ *(?!//).*[a-z]\n *\$\{[a-z].*", re.MULTILINE)
    for path in _FILES.rglob("*.js"):
        if "vendor" not in str(path):
            assert joined.findall(path.read_text(encoding="utf-8")) == [], path.name


def test_each_file_has_its_type_and_is_sent_again_only_if_it_changed(platform: Platform) -> None:
    script = get(platform, "/console/app.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert get(platform, "/console/app.js", **{"If-None-Match": script.headers["etag"]}).status_code == 304
    assert get(platform, "/console/").headers["location"] == "../console"


def test_clients_that_do_not_read_keep_no_copies_of_a_file_in_memory(platform: Platform) -> None:
    """Born from a fault: anyone could fill the memory of the server with 1.3 MB for each connection."""
    path = "/console/vendor/swagger-ui-bundle.js"
    assert len(get(platform, path).content) > 1_500_000
    address = urlsplit(platform.url)
    before = psutil.Process().memory_info().rss
    with ExitStack() as stack:
        for _ in range(_NUM_IDLE):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.hostname, address.port))
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert client.recv(16) == b"HTTP/1.1 200 OK\r"
        grown = psutil.Process().memory_info().rss - before
    assert grown < _NUM_IDLE * 500_000


@pytest.mark.parametrize(
    "path", ["nothing.js", "vendor", "vendor/LICENSE.htm", "%2e%2e/errors.py", "views/%2e%2e/app.js"]
)
def test_no_other_file_of_the_package_can_be_read(platform: Platform, path: str) -> None:
    assert get(platform, f"/console/{path}").status_code == 404


def test_the_console_is_small_and_needs_no_other_server() -> None:
    texts = [path for path in _FILES.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg")]
    of_console = [path for path in texts if path.parent.name != "docs" and "swagger" not in path.name]
    assert sum(path.stat().st_size for path in of_console) <= _MAX_BYTES
    own = [path.read_text(encoding="utf-8") for path in texts if path.parent.name != "vendor"]
    assert not any("https://" in text or "//cdn" in text for text in own)
    assert not any("innerHTML" in text or "insertAdjacentHTML" in text for text in own)


def test_each_vendored_library_is_the_pinned_one_and_has_its_license() -> None:
    vendor = _FILES / "vendor"
    pinned = json.loads((vendor / "versions.json").read_text(encoding="utf-8"))
    scripts = {path.name for path in vendor.iterdir() if path.suffix in (".js", ".css")}
    assert scripts == pinned.keys()
    for name, facts in pinned.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == facts["sha256"], name
        assert (vendor / f"LICENSE.{facts['package']}").is_file()
