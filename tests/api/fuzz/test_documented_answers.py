"""Requests that schemathesis generates from the served OpenAPI document. Every answer must be as the document says:
its status, its media type and its schema.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from slora_api.keys.key_record import OPERATOR_SCOPES
from tests.api.conftest import Kit
from tests.api.fuzz.requests import ACCEPTED
from tests.api.fuzz.watched_server import PATIENCE_S, WatchedServer, explain_answer
from tests.api.served import ADMIN_KEY

# Cases of each operation. Operations without parameters have only one case.
_QUICK, _SOAK = 2, 100
_CHECKS: list[CheckFunction] = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Path parameters that name something on the watched server.
_NAMES = {"tenant": "fuzz", "name": "small", "reference": "small", "model": "small", "alias": "latest"}


@pytest.fixture(scope="module")
def document(watched: WatchedServer) -> Any:
    loaded = schemathesis.openapi.from_url(f"{watched.served.url}/openapi.json")
    loaded.config.generation.with_security_parameters = False  # `_send` adds the key
    return loaded


@pytest.fixture(scope="module")
def names(watched: WatchedServer, kit: Kit) -> Callable[[Any], dict[str, str]]:
    """Returns the path parameters for an operation. What it may delete or limit is not what others need."""
    files = {name: (name, content) for name, content in _adapter_files(kit).items()}
    with watched.client() as client:
        client.post("/v1/adapters", data={"name": "doomed"}, files=files).raise_for_status()
        with_head = {name: (name, content) for name, content in _add_head(_adapter_files(kit)).items()}
        client.post("/v1/adapters", data={"name": "sorter"}, files=with_head).raise_for_status()
        client.put("/v1/adapters/small/aliases/doomed", json={"versions": {"1": 100}}).raise_for_status()
    limited_key, doomed_key = (watched.served.make_key(name).split("_")[1] for name in ("limited", "fuzz"))
    watched.served.make_key("purged")
    file_id, doomed_file_id = (_upload_lines(watched, 1) for _ in range(2))
    # A batch that is still running when it is cancelled.
    long_file_id = _upload_lines(watched, 300)

    def find(operation: Any) -> dict[str, str]:
        if operation.path.startswith("/v1/files"):
            return {"file_id": doomed_file_id if operation.method == "delete" else file_id}
        if operation.path.endswith("/cancel"):
            return {"batch_id": _start_batch(watched, long_file_id)}
        if operation.path.startswith("/v1/batches"):
            is_one = "batch_id" in operation.path
            return {"file_id": file_id, **({"batch_id": _start_batch(watched, file_id)} if is_one else {})}
        if operation.path.endswith("/purge"):
            return {"tenant": "purged"}
        if operation.path.endswith("/quota"):
            return {"tenant": "limited", "key_id": limited_key}
        doomed = {"reference": "doomed", "alias": "doomed", "key_id": doomed_key}
        return _NAMES | doomed if operation.method == "delete" else {**_NAMES, "key_id": limited_key}

    return find


def _adapter_files(kit: Kit) -> dict[str, bytes]:
    return {
        "config": (kit.wide / "adapter_config.json").read_bytes(),
        "weights": (kit.wide / "adapter_model.safetensors").read_bytes(),
    }


def _add_head(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same adapter with a head that classifies texts."""
    config, tensors = json.loads(files["config"]), load(files["weights"])
    (width,) = {values.shape[1] for name, values in tensors.items() if "q_proj.lora_A" in name}
    head = {"base_model.model.score.weight": np.ones((2, width), np.float32)}
    return {
        "config": json.dumps(config | {"modules_to_save": ["classifier", "score"]}).encode(),
        "weights": save(tensors | head),
    }


def _upload_lines(watched: WatchedServer, num_lines: int) -> str:
    """Uploads the input of a batch, and returns the file's id."""
    body = {"model": "default", "prompt": "a", "max_tokens": 50}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(num_lines)
    ]
    content = "\n".join(map(json.dumps, lines))
    with watched.client() as client:
        answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})
        return str(answer.raise_for_status().json()["id"])


def _new_batch(file_id: str) -> dict[str, str]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}


def _start_batch(watched: WatchedServer, file_id: str) -> str:
    with watched.client() as client:
        return str(client.post("/v1/batches", json=_new_batch(file_id)).raise_for_status().json()["id"])


def _operations(document: Any) -> list[Any]:
    """All operations but the live feeds: schemathesis takes the schema of a stream for that of an event, and a stream
    of a million frames takes days. tests/api/live compares their frames with the document.
    """
    found = [one.ok() for one in document.get_all_operations()]
    return [one for one in found if not one.path.endswith("/live")]


def _send(watched: WatchedServer, case: Case, session: requests.Session) -> int:
    """Returns the status of the answer, which must be as the document says."""
    scopes = case.operation.definition.raw.get("security", [{"api_key": []}])[0]["api_key"]
    key = watched.key if OPERATOR_SCOPES.isdisjoint(scopes) else ADMIN_KEY
    answer = case.call(headers={"Authorization": f"Bearer {key}"}, session=session, timeout=PATIENCE_S)
    media_type = answer.headers.get("content-type", [""])[0]
    wrong = explain_answer(answer.status_code, answer.content, media_type)
    assert wrong is None, f"{case.as_curl_command()}: {wrong}"
    case.validate_response(answer, checks=_CHECKS)
    return answer.status_code


def test_every_operation_succeeds_as_the_openapi_document_says(
    watched: WatchedServer, document: Any, names: Callable[[Any], dict[str, str]], kit: Kit
) -> None:
    """A document can only be wrong about successes that a test has seen."""
    bodies = ACCEPTED | {
        "/v1/adapters": {"name": "small", **_adapter_files(kit)},
        "/admin/tenants/{tenant}/adapters": {"name": "small", **_adapter_files(kit)},
        "/v1/files": {"purpose": "batch", "file": b"{}"},
    }
    failed = {}
    with requests.Session() as session:
        for operation in _operations(document):
            if operation.path.endswith("/restart"):
                continue  # This server has one engine. tests/api/routes/test_engines.py compares the answer.
            known = names(operation)
            if operation.path == "/v1/batches":
                bodies[operation.path] = _new_batch(known["file_id"])
            parameters = {one.name: known.get(one.name) for one in operation.path_parameters}
            has_body = operation.path in bodies and operation.method not in ("get", "delete")
            body = {"body": bodies[operation.path]} if has_body else {}
            status = _send(watched, operation.Case(path_parameters=parameters, **body), session)
            if status >= 300:
                failed[operation.label] = status
    assert not failed, "the document is not checked there; add a body to ACCEPTED or a name to `names`"


def test_every_answer_is_as_the_openapi_document_says(
    watched: WatchedServer,
    document: Any,
    names: Callable[[Any], dict[str, str]],
    soak: bool,
    report: Callable[[str], None],
) -> None:
    statuses: Counter[int] = Counter()
    num_cases = _SOAK if soak else _QUICK
    with requests.Session() as session:
        for operation in _operations(document):
            known = {} if operation.method == "delete" or "batches" in operation.path else names(operation)
            statuses.update(_try_operation(watched, operation, known, session, num_cases))
    report(f"schemathesis: {statuses.total()} requests; answers by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= (2000 if soak else 50)


def _try_operation(
    watched: WatchedServer, operation: Any, known: dict[str, str], session: requests.Session, num_cases: int
) -> list[int]:
    """Returns the statuses of the answers. known: path parameters for some of the cases."""
    accepted = ACCEPTED.get(operation.path)
    statuses = []

    @settings(max_examples=num_cases)
    @given(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        st.booleans(),
        st.booleans(),
    )
    def send(case: Case, has_names: bool, has_body: bool) -> None:
        if has_names:
            case.path_parameters |= {name: known[name] for name in case.path_parameters if name in known}
        if has_body and accepted is not None and isinstance(case.body, dict):
            # Most generated bodies break some rule. A field or two of them in an accepted body gets further.
            case.body = accepted | dict(list(case.body.items())[:2])
        statuses.append(_send(watched, case, session))

    send()
    return statuses
