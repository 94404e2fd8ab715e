"""The pages of all routes and of all objects of the API, from the application's own OpenAPI document."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from slora_api.http.openapi import OpenApiDocument
from slora_api.keys.authentication import required_scopes
from slora_api.serve.app import ROUTES

_INTRODUCTION = """\
# HTTP API

Send `Authorization: Bearer KEY` with each request that needs a key. A star marks what is required. A server has the
same reference at `/docs`, and as an OpenAPI document at `/openapi.json`. Clients of OpenAI's API work unchanged;
[serving.md](../serving.md#which-request-fields-are-supported) says which of their fields have an effect.
"""
_OBJECTS_INTRODUCTION = """\
# Objects of the HTTP API

The JSON objects that [routes](api.md) take and answer. A star marks what is required.
"""
_TAGS = {"operator": "Operators", "server": "The server", "completions": "Answers"}


_CODE = re.compile(r"`([^`]+)`")


def prose(text: str) -> Markup:
    """Marks text between backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def make_pages() -> dict[str, str]:
    """Page -> Markdown."""
    document = json.loads(OpenApiDocument(ROUTES, required_scopes).content())
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {"prose": prose, "json": json.dumps}
    environment.tests["unsupported"] = lambda text: bool(text) and text.startswith("Not supported")
    source = Path(__file__).with_name("schemas.html").read_text(encoding="utf-8")
    macros = environment.from_string(source).make_module()

    def describe_route(method: str, path: str, route: dict[str, Any]) -> str:
        parts = [f"### {method.upper()} {path} {{ #{route['operationId']} }}", _describe_key(route)]
        parts += [f"<p>{prose(route['description'])}</p>"] if route.get("description") else []
        if route.get("parameters"):
            rows = "".join(describe_parameter(parameter) for parameter in route["parameters"])
            parts.append(f"<p><b>Parameters</b></p><table>{rows}</table>")
        for media_type, content in route.get("requestBody", {}).get("content", {}).items():
            schema = content["schema"]
            body = macros.fields(schema) if schema.get("properties") else macros.type(schema)
            parts.append(f"<div><p><b>Body</b>, <code>{media_type}</code></p>{body}</div>")
        rows = "".join(describe_answer(status, answer) for status, answer in route["responses"].items())
        return "\n\n".join([*map(_join_lines, parts), _join_lines(f"<table>{rows}</table>")])

    def describe_parameter(parameter: dict[str, Any]) -> str:
        star = "<b>*</b>" if parameter.get("required") else ""
        text = f"<div>{prose(parameter['description'])}</div>" if parameter.get("description") else ""
        name, kind = parameter["name"], macros.type(parameter["schema"])
        return f"<tr><td><code>{name}</code>{star}</td><td>{kind}, {parameter['in']}{text}</td></tr>"

    def describe_answer(status: str, answer: dict[str, Any]) -> str:
        kinds = ", or ".join(
            f"{macros.type(content['schema'].get('contentSchema') or content['schema'])} as <code>{kind}</code>"
            for kind, content in answer.get("content", {}).items()
        )
        text = "" if status.startswith("2") else f"<div>{prose(answer['description'])}</div>"
        return f"<tr><td><code>{status}</code></td><td>{kinds}{text}</td></tr>"

    routes: defaultdict[str, list[str]] = defaultdict(list)
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            routes[route["tags"][0]].append(describe_route(method, path, route))
    api = [_INTRODUCTION]
    for tag, described in sorted(routes.items()):
        api += [f"## {_TAGS.get(tag, tag.capitalize())}", *described]
    objects = [_OBJECTS_INTRODUCTION]
    for name, schema in sorted(document["components"]["schemas"].items()):
        objects.append(f"## {name} {{ #{name} }}\n\n<div>{_join_lines(str(macros.fields(schema)))}</div>")
    return {
        # Both pages are folders of the site.
        "api.md": "\n\n".join(api).replace('href="#', 'href="../objects/#'),
        "objects.md": "\n\n".join(objects),
    }


def _describe_key(route: dict[str, Any]) -> str:
    if not route.get("security"):
        return "Needs no key."
    scopes = ", ".join(f"`{scope}`" for scope in route["security"][0]["api_key"])
    return f"Needs a key with the scope {scopes}." if scopes else "Needs any valid key."


def _join_lines(html: str) -> str:
    """Markdown would end a block of HTML at an empty line."""
    return "\n".join(line for line in html.splitlines() if line.strip())
