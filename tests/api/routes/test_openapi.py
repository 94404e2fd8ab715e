"""The served OpenAPI document describes every route, its callers, its errors and its answers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from slora_api.keys.authentication import PUBLIC_PATHS
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.tenants.test_authentication import walk_routes

Json = dict[str, Any]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("data"), ScriptedEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def document(platform: Platform) -> Json:
    found: Json = httpx.get(f"{platform.url}/openapi.json", verify=False).raise_for_status().json()
    return found


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_the_document_has_every_route(platform: Platform, document: Json) -> None:
    known = {
        (method.lower(), route.path_format)
        for route in walk_routes(platform)
        for method in route.methods
        if route.include_in_schema
    }
    assert {(method, path) for method, path, _ in operations(document)} == known


def test_every_route_that_needs_a_key_says_so_and_documents_its_refusals(document: Json) -> None:
    for method, path, operation in operations(document):
        is_public = path in PUBLIC_PATHS
        assert ("security" not in operation) == is_public, (method, path)
        assert ({"401", "403", "503"} <= operation["responses"].keys()) or is_public, (method, path)


def test_every_route_with_a_body_documents_the_limits_of_bodies(document: Json) -> None:
    for method, path, operation in operations(document):
        assert (method in ("put", "patch")) <= ("requestBody" in operation) or path.endswith("/pin"), path
        if "requestBody" in operation:
            assert {"400", "408", "413", "415", "429", "503"} <= operation["responses"].keys(), (method, path)


def test_every_answer_has_a_media_type_and_a_schema_with_fields(document: Json) -> None:
    for method, path, operation in operations(document):
        for status, answer in operation["responses"].items():
            for media_type, content in answer["content"].items():
                schema = content["schema"]
                named = "$ref" in schema or all("$ref" in one for one in schema.get("anyOf", [{}]))
                is_typed = schema.get("type") == ("object" if path == "/openapi.json" else "string")
                assert named or is_typed, (method, path, status, media_type)


def test_errors_name_their_codes(document: Json) -> None:
    answers = document["paths"]["/v1/adapters/{reference}"]["delete"]["responses"]
    assert "`model_not_found`" in answers["404"]["description"]
    assert "`adapter_in_use`" in answers["409"]["description"]
    assert "`disk_full`" in answers["507"]["description"]


def test_streams_are_documented_as_events(document: Json) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        operation = document["paths"][path]["post"]
        assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
        assert "model" in operation["requestBody"]["content"]["application/json"]["schema"]["required"]


def test_every_reference_resolves_and_every_schema_is_valid(document: Json) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    named = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert named <= schemas.keys()
    assert "$defs" not in text and "HTTPValidationError" not in text


def test_operations_have_distinct_names(document: Json) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)


def test_fields_are_described_by_the_docstrings_of_their_objects_and_of_inherited_ones(
    document: Json,
) -> None:
    schemas = document["components"]["schemas"]
    adapter = schemas["AdapterObject"]["properties"]
    assert adapter["created"]["description"] == "when the name was made."
    assert adapter["updated"]["description"].startswith("when the version was made.")
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert body["description"] == "POST /v1/completions."
    assert "lower is served sooner" in body["properties"]["priority"]["description"]


def test_the_docs_show_every_route_and_object_and_load_nothing(platform: Platform, document: Json) -> None:
    answer = httpx.get(f"{platform.url}/docs", verify=False).raise_for_status()
    page = answer.text
    for _, path, operation in operations(document):
        assert path in page and f'<section id="{operation["operationId"]}">' in page
    targets = {part.partition('"')[0] for part in page.split('href="#')[1:]}
    identifiers = {part.partition('"')[0] for part in page.split(' id="')[1:]}
    assert targets <= identifiers and document["components"]["schemas"].keys() <= identifiers
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page and "://" not in page and "&lt;code&gt;" not in page


def test_the_docs_list_the_required_fields_of_a_body_first(platform: Platform, document: Json) -> None:
    page = httpx.get(f"{platform.url}/docs", verify=False).text
    for _, _, operation in operations(document):
        section = page.split(f'<section id="{operation["operationId"]}">')[1].split("<h4>Answers")[0]
        rows = section.split("<h4>Body")[-1].split("<details>")[0].split("<tr>")[1:]
        is_required = ['title="required"' in row for row in rows]
        assert is_required == sorted(is_required, reverse=True), operation["operationId"]
