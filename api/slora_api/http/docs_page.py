"""/docs: the OpenAPI document as a page to read.

The page has no script, and works without access to the internet. The pages of FastAPI load scripts from the internet.
"""

import importlib.resources
import json
import re
from typing import Any

import jinja2
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup, escape

from slora_api.http.openapi import LazyContent, OpenApiDocument

router = APIRouter(tags=["server"])

_CODE = re.compile(r"`([^`]+)`")
# The browser may load no further files for this page.
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class DocsPage:
    """The OpenAPI document as a page. It is made at the first request."""

    def __init__(self, document: OpenApiDocument) -> None:
        self._lazy = LazyContent(lambda: _render(json.loads(document.content())).encode())

    def content(self) -> bytes:
        return self._lazy.content()


@router.get("/docs", response_class=HTMLResponse)
def show_docs(request: Request) -> HTMLResponse:
    """Shows this reference. The page needs no key, because it is the same for every server of a release."""
    page: DocsPage = request.app.state.docs_page
    return HTMLResponse(page.content(), headers=_HEADERS)


def make_template() -> jinja2.Template:
    """Returns the template of the page. The project's documentation also uses the macros `type` and `fields` of the
    template.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {"prose": _mark_code, "json": json.dumps}
    source = (
        importlib.resources.files("slora_api.http").joinpath("docs_page.html").read_text(encoding="utf-8")
    )
    return environment.from_string(source)


def _render(document: dict[str, Any]) -> str:
    operations = [
        {**operation, "method": method.upper(), "path": path, "tag": operation["tags"][0]}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return make_template().render(
        info=document["info"], operations=operations, schemas=document["components"]["schemas"]
    )


def _mark_code(text: str) -> Markup:
    """Marks text between backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
