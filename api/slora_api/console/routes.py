"""The routes of the console, and of the API's reference at /docs. Their files are at /console, and the path / redirects
browsers to the console.

The files are part of the package and contain no data, so they need no key. The user enters a key, and the browser sends
this key with each request to the API. The policy in the headers lets the page load only its own files and call only its
own server.
"""

import hashlib
import importlib.resources
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from slora_api.core.package_version import find_package_version

# These routes are not part of the API, so its OpenAPI document does not list them.
router = APIRouter(tags=["server"], include_in_schema=False)

_PAGE = "index.html"
_DOCS_PAGE = "docs/index.html"
_PIECE_BYTES = 1 << 16
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The browser checks each time whether its copy is current, so it gets the new files after an upgrade of the server.
    "Cache-Control": "no-cache",
}
_WHAT_THIS_IS = """slora {version} serves one base model with the LoRA adapters of many tenants.

  {url}v1        the API, compatible with OpenAI's; send a key as "Authorization: Bearer KEY"
  {url}docs      its reference
  {url}console   the console, for a browser
"""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


@router.get("/")
async def show_root(request: Request) -> Response:
    """Redirects a browser to the console. Other clients get a text that says what this server is."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("console", headers={"Vary": "Accept"})
    text = _WHAT_THIS_IS.format(version=find_package_version(), url=request.base_url)
    return PlainTextResponse(text, headers={"Vary": "Accept", "X-Content-Type-Options": "nosniff"})


# The first request reads the files, so these functions are not `async`: FastAPI then runs them on a thread.
@router.get("/console")
def show_console(request: Request) -> Response:
    return _answer(request, _PAGE)


@router.get("/console/{name:path}")
def show_file(request: Request, name: str) -> Response:
    # The page refers to its files by paths relative to /console, so /console/ would not find them.
    return _answer(request, name) if name else RedirectResponse("../console")


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """The OpenAPI document in Swagger UI, which sets styles of its own."""
    return _answer(
        request, _DOCS_PAGE, _POLICY | {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:"}
    )


def _answer(request: Request, name: str, policy: Mapping[str, str] = _POLICY) -> Response:
    file = _read_files().get(name)
    if file is None:
        raise HTTPException(404, "Not Found")
    policy_text = "; ".join(f"{kind} {sources}" for kind, sources in policy.items())
    headers = {**_HEADERS, "Content-Security-Policy": policy_text, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    headers["Content-Length"] = str(len(file.content))
    return StreamingResponse(_cut(file.content), media_type=file.media_type, headers=headers)


async def _cut(content: bytes) -> AsyncIterator[memoryview]:
    """Yields a file in pieces. A client that does not read keeps one piece in memory, not a copy of the file."""
    for at in range(0, len(content), _PIECE_BYTES):
        yield memoryview(content)[at : at + _PIECE_BYTES]


@cache
def _read_files() -> dict[str, _File]:
    """Returns the files by their path below /console."""
    return dict(_walk(importlib.resources.files("slora_api.console") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, _File]]:
    found = []
    for entry in folder.iterdir():
        media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif media_type is not None:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append((prefix + entry.name, _File(content, media_type, tag)))
    return found
