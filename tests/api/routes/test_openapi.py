"""The served OpenAPI document describes every route, its callers, its errors and its answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from jsonschema import Draft202012Validator

from slora_api.http.openapi import read_common_descriptions
from slora_api.keys.authentication import PUBLIC_PATHS
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.api.tenants.test_authentication import walk_routes

Json = dict[str, Any]


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


def test_like_parts_of_two_apis_have_schemas_of_their_own(document: Json) -> None:
    """Two classes of one name had one schema, which was wrong for one of them."""
    schemas = document["components"]["schemas"]
    assert schemas["TextPart"]["properties"]["type"]["const"] == "text"
    assert "input_text" in schemas["ResponsesTextPart"]["properties"]["type"]["enum"]
    assert "custom" in schemas["CustomChoice"]["properties"]
    assert "custom" not in schemas["ResponsesCustomChoice"]["properties"]


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


def test_the_example_of_each_body_is_answered(document: Json, tmp_path: Path) -> None:
    """Someone who tries a route in the reference sends it as it is."""
    tried = 0
    with (
        running_platform(tmp_path, ScriptedEngine(max_model_len=4096)) as platform,
        platform.client(platform.key("example")) as client,
    ):
        head = {"base_model.model.score.weight": np.ones([SHAPE.hidden_size] * 2, np.float32)}
        config = make_config(modules_to_save=["classifier", "score"])
        answer = platform.upload(
            platform.key("example"), "my-classifier", make_members(config, make_tensors() | head)
        )
        assert answer.is_success, answer.text
        platform.says("hello")
        for method, path, operation in operations(document):
            body = (
                operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            )
            if body is not None:
                answer = client.request(method, path, json=body)
                assert answer.is_success, (path, answer.text)
                tried += 1
    assert tried >= 11


def find_undescribed(node: Any, place: str) -> Iterator[str]:
    """The fields and parameters without a description."""
    if isinstance(node, list):
        for value in node:
            yield from find_undescribed(value, place)
    elif isinstance(node, dict):
        fields = node.get("properties")
        for name, field in fields.items() if isinstance(fields, dict) else ():
            if isinstance(field, dict) and not field.get("description"):
                yield f"{place}: {name}"
        for parameter in node.get("parameters", ()) if isinstance(node.get("responses"), dict) else ():
            if not parameter.get("description"):
                yield f"{place}: parameter {parameter['name']}"
        for key, value in node.items():
            yield from find_undescribed(value, str(node.get("title", key)))


def test_every_field_and_every_parameter_has_a_description(document: Json) -> None:
    assert list(find_undescribed(document, "")) == []


def test_no_common_description_is_left_over(document: Json) -> None:
    """Each describes a field that some object has."""
    text = json.dumps(document)
    for name in read_common_descriptions():
        assert f'"{name.rpartition(".")[2]}"' in text, name
