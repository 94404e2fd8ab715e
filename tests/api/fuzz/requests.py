"""Strategies for requests to every route of the API."""

import json
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import quote

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter
from pydantic import BaseModel

from slora_api.completions.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelFields,
    TemplateFields,
    TokenizeRequest,
)
from slora_api.embeddings.schemas import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from slora_api.http.unsupported import Unsupported
from slora_api.messages.messages_request import CountTokensRequest, MessagesRequest
from slora_api.responses.responses_request import ResponsesRequest
from slora_api.serve.app import ROUTES
from tests.api.fuzz.json_texts import ODD_TEXTS, mutated_object, odd_json

__all__ = ["ACCEPTED", "HttpRequest", "http_requests", "routes"]

_OPERATORS = ("/admin", "/metrics", "/load", "/v1/load_lora", "/v1/unload_lora")
_GENERATION = {"model": "default", "max_tokens": 3}
# For each path, an accepted body. It is accepted once, if it creates or deletes something.
ACCEPTED: dict[str, dict[str, Any]] = {
    "/v1/completions": {**_GENERATION, "prompt": "a"},
    "/v1/chat/completions": {**_GENERATION, "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"model": "default", "max_output_tokens": 3, "input": "a"},
    "/v1/messages": {**_GENERATION, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"model": "default", "messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"model": "default", "input": "a"},
    "/v1/responses/input_tokens": {"model": "default", "input": "a"},
    "/v1/classify": {"model": "sorter", "input": ["a", "b"]},
    "/v1/score": {"model": "default", "text_1": "a", "text_2": ["a", "b"]},
    "/v1/rerank": {"model": "default", "query": "a", "documents": ["a", {"text": "b"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/adapters/{name}/aliases/{alias}": {"versions": {"1": 100}},
    "/admin/tenants": {"name": "fuzzed"},
    "/admin/tenants/{tenant}": {"weight": 2.0},
    "/admin/tenants/{tenant}/keys": {"adapter": "small", "scopes": ["inference"]},
    "/admin/keys": {"name": "fuzzed"},
    "/admin/prices": {"currency": "EUR", "input": 0.25, "output": 1},
    "/admin/tenants/{tenant}/purge": {"confirm": "purged", "ledger": "erase"},
    "/admin/tenants/{tenant}/quota": {"tokens_per_minute": 1000},
    "/admin/keys/{key_id}/quota": {"requests_per_minute": 1000},
    "/admin/keys/{key_id}/rotate": {"overlap_seconds": 60},
    "/admin/engines/{name}/restart": {"allow_outage": False},
    "/v1/load_lora_adapter": {"lora_name": "local", "lora_path": "small", "load_inplace": True, "tenant": "fuzz"},
    "/v1/unload_lora_adapter": {"lora_name": "local", "tenant": "fuzz"},
}  # fmt: skip
# These routes read the body themselves. FastAPI knows the schemas of the others.
_SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/classify": ClassifyRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
} | {
    route.path: schema
    for route in ROUTES
    for field in route.dependant.body_params
    for schema in (field.field_info.annotation, *get_args(field.field_info.annotation))
    if route.path in ACCEPTED and isinstance(schema, type) and issubclass(schema, BaseModel)
}
# Values that are valid by themselves, so that their combinations reach the engine. In requests for answers, a number or
# a boolean that is not listed has the values of its type.
_OF_TYPE: dict[type, list[Any]] = {bool: [True, False], int: [0, 1, 5], float: [0, 0.5, 1]}
_PLAUSIBLE: dict[str, list[Any]] = {
    "model": ["default", "small", "small@latest", "base"],
    "prompt": ["", "a b c", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "a" * 400],
    "messages": [[{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]],
    "input": [
        "a b c",
        "",
        ["a", "b"],
        [1, 2, 3],
        [[1], [2, 3]],
        ["a"] * 90,
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        [
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "a"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ],
    ],
    "instructions": ["a"],
    "system": ["a", [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, True],
    "stop_sequences": [["a"]],
    "output_config": [{"effort": "high"}, {"format": {"type": "json_schema", "schema": {"type": "object"}}}],
    "verbosity": ["low"],
    "unknown": [None, [], {}, ""],
    "max_output_tokens": [0, 1, 5, 400],
    "include": [["message.output_text.logprobs"]],
    "text": [{"format": {"type": "json_object"}}, {"verbosity": "low"}],
    "dimensions": [1, 7, 1000],
    "encoding_format": ["float", "base64"],
    "pooling": ["last", "mean"],
    "normalize": [False, True],
    "max_tokens": [0, 1, 5, 400],
    "max_completion_tokens": [1, 4],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 1, 50, 10**6],
    "min_p": [0, 0.5, 1],
    "presence_penalty": [-2, 0.5],
    "frequency_penalty": [2],
    "repetition_penalty": [0.5, 1.5],
    "logit_bias": [{"1": 100, "2": -100}, {str(at): 1 for at in range(90)}],
    "min_tokens": [0, 3],
    "seed": [0, 2**63 - 1],
    "n": [1, 2, 8],
    "best_of": [2, 8],
    "length_penalty": [0.0, -1.5],
    "stop": ["a", ["b", "c"], ["x" * 400], [chr(at) * 3 for at in range(65, 75)]],
    "stop_token_ids": [[1, 2], list(range(90))],
    "allowed_token_ids": [[1, 2], list(range(90))],
    "bad_words": [["a", "b c"], ["x" * 64]],
    "prompt_logprobs": [0, 5],
    "stream": [True],
    "stream_options": [{"include_usage": True, "include_timing": True}, {"continuous_usage_stats": True}],
    "user": ["somebody"],
    "metadata": [{"a": "b"}],
    "request_id": ["mine"],
    "tokens": [[], [1, 2, 3], list(range(90))],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto", {"name": "f"}],
    "documents": [["a", {"text": "b"}], []],
    "text_1": ["a", ["a", "b"], []],
    "text_2": ["a", ["a", "b"], ["a"] * 90],
    "top_n": [0, 1, 400],
    "reasoning_effort": ["none", "medium", "high"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"messages": []}, {"deep": [[{"a": 10**40}]]}],
    "priority": [-5, 5],
    "deadline_ms": [1, 60_000],
    "logprobs": [0, 5, True],
    "top_logprobs": [5],
    "echo": [True],
}
_JSON = "application/json"
_header_values = st.sampled_from(
    [b"", b"\xff\xfe", b"a" * 8_000, b"default", b"0", b"-1", b"18446744073709551616", b"gzip", b"text/plain"]
)
_headers = st.dictionaries(
    st.sampled_from(
        ["x-request-id", "x-session-id", "Accept", "Content-Encoding", "Range", "Expect", "Cookie"]
    ),
    _header_values,
    max_size=2,
)
_queries = st.dictionaries(
    st.sampled_from(["limit", "after", "force", "unknown"]),
    st.sampled_from([*ODD_TEXTS[:-2], "1", "0", "-1", "1000", "99999999999999999999", "true"]),
    max_size=2,
)


@dataclass(frozen=True)
class HttpRequest:
    """path: includes the query, as it is sent. is_operator: whether the request has the admin key."""

    method: str
    path: str
    headers: dict[str, bytes]
    body: bytes
    is_operator: bool

    def __repr__(self) -> str:
        body = self.body if len(self.body) < 500 else self.body[:300] + b"... %d bytes" % len(self.body)
        return f"HttpRequest({self.method} {self.path[:300]} {self.headers} {body!r})"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(repr(self))


def routes() -> list[tuple[str, str]]:
    """(method, path) of every route of the API."""
    return [(method, route.path) for route in ROUTES for method in sorted(route.methods or ())]


def _supported_fields(schema: type[BaseModel]) -> list[str]:
    """The names of the fields, with one example of those that the server does not support."""
    fields = schema.model_fields.items()
    unsupported = [name for name, field in fields if any(isinstance(m, Unsupported) for m in field.metadata)]
    return [name for name in schema.model_fields if name not in unsupported[1:]]


def _plausible_values(schema: type[BaseModel]) -> dict[str, list[Any]]:
    found = dict(_PLAUSIBLE)
    if issubclass(schema, ModelFields | TemplateFields):
        for name, field in schema.model_fields.items():
            of_type = [value for kind in get_args(field.annotation) for value in _OF_TYPE.get(kind, ())]
            if of_type:
                found.setdefault(name, of_type)
    return found


def _bodies(path: str) -> st.SearchStrategy[bytes]:
    if path not in _SCHEMAS:
        return st.one_of(st.just(b""), odd_json.map(str.encode))
    schema, proper = _SCHEMAS[path], ACCEPTED[path]
    mutated = mutated_object(proper, _supported_fields(schema), _plausible_values(schema)).map(str.encode)
    whole = json.dumps(proper).encode()
    broken = st.builds(
        lambda at, inserted: whole[:at] + inserted + whole[at:],
        st.integers(0, len(whole)),
        st.sampled_from([b"\x00", b"\xff", b"{", b'"', b"", b"\\u", b"," * 100]),
    )
    # Most bodies are objects of the right schema with changed fields, because the parser refuses everything else.
    return st.integers(0, 9).flatmap(
        lambda at: broken if at == 0 else odd_json.map(str.encode) if at == 1 else mutated
    )


def _segments(method: str) -> st.SearchStrategy[str]:
    # Adapters that other requests need are not deleted.
    texts = [text for text in ODD_TEXTS if method != "DELETE" or not text.startswith("small")]
    return st.sampled_from([text for text in texts if text] + ["fuzzed", "prod"])


@st.composite
def http_requests(draw: st.DrawFn) -> HttpRequest:
    method, pattern = draw(st.sampled_from(routes()))
    path = ""
    for segment in pattern.strip("/").split("/"):
        text = draw(_segments(method)) if segment.startswith("{") else segment
        path += "/" + quote(text.encode("utf-8", "surrogatepass"), safe="")
    query = draw(_queries)
    if query:
        written = {
            name: quote(text.encode("utf-8", "surrogatepass"), safe="") for name, text in query.items()
        }
        path += "?" + "&".join(f"{name}={text}" for name, text in written.items())
    body = draw(_bodies(pattern)) if method in ("POST", "PUT", "PATCH") else b""
    headers = {**draw(_headers), "Content-Type": _JSON.encode()}
    assume(len(path) < 60_000)  # httpx refuses longer ones.
    return HttpRequest(method, path, headers, body, pattern.startswith(_OPERATORS))
