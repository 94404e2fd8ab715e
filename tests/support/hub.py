"""A stand-in for the Hugging Face hub's downloads: a snapshot cache on disk, and a server on the loopback interface."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from unittest.mock import patch

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out_snapshot(
    cache: Path, repo: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str = "main"
) -> Path:
    """Writes files into a cache as the hub's client does: blobs named by hash, a directory of links for each commit,
    and a file for each ref that names its commit."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for name, content in files.items():
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    (home / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit, encoding="utf-8")
    return snapshot


def adapter_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@contextmanager
def hub_client(cache: Path, url: str | None = None) -> Iterator[None]:
    """Directs the hub's client to a cache and to a server. url: None for a client that is offline."""
    places: dict[str, str | bool] = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": url is None}
    if url is not None:
        places["ENDPOINT"] = url
        places["HUGGINGFACE_CO_URL_TEMPLATE"] = url + "/{repo_id}/resolve/{revision}/{filename}"
    with patch.multiple(constants, **places):
        yield


@dataclass
class Hub:
    """A server with repositories. It maps (repository, commit) to files, and (repository, ref) to commits.

    sizes: (repository, name) -> the size that the server claims for a file, if it is not asked for its bytes.
    failing: HTTP status and error code that the server returns for every request about a repository.
    tokens: the Authorization headers of requests about repositories. asked: requested paths, in order.
    stalling: names of files of which only the first byte is sent until `released`.
    """

    url: str = ""
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    failing: dict[str, tuple[int, str]] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    stalling: set[str] = field(default_factory=set)
    released: Event = field(default_factory=Event)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        parts = path.split("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        if len(parts) < 4:
            return 404, {}, b"{}"
        org, name, verb, revision, *rest = parts[2:] if is_api else parts
        repo = f"{org}/{name}"
        if repo in self.failing:
            status, code = self.failing[repo]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        commit = self.revisions.get((repo, revision.replace("%2F", "/")), revision)
        files = self.files.get((repo, commit))
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if verb == "revision":
            return 200, {}, json.dumps({"id": repo, "sha": commit}).encode()
        if verb == "tree":
            found = [
                {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
                for path, content in files.items()
            ]
            return 200, {}, json.dumps(found).encode()
        path = "/".join(rest)
        content = files[path]
        size = self.sizes.get((repo, path), len(content))
        headers = {"ETag": f'"{_git_hash(content)}"', "X-Repo-Commit": commit, "Content-Length": str(size)}
        return 200, headers, content


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.count("/") > 2:  # The client also asks the hub about itself.
                hub.tokens.add(self.headers["Authorization"])
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                if self.path.rsplit("/", 1)[-1] in hub.stalling:
                    self.wfile.write(body[:1])
                    self.wfile.flush()
                    hub.released.wait()
                    return
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
