"""Spans of requests, as a collector receives them: OTLP over HTTP, with the protobuf of OpenTelemetry."""

import asyncio
import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from slora_adapters.store import store_url
from slora_api.core.otel_tracing import open_otel_tracing
from slora_api.core.tracing import open_tracing
from tests.api.conftest import Kit
from tests.api.platform import ADMIN_KEY, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import environment, serving
from tests.api.server.test_server import upload

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a secret prompt"


class Collector:
    """Receives spans. address: of its HTTP server. bodies: the requests as they arrived."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.bodies: list[bytes] = []

    @property
    def spans(self) -> list[Span]:
        found = []
        for body in self.bodies:
            request = ExportTraceServiceRequest.FromString(body)
            found += [
                span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans
            ]
        return found

    @property
    def resource(self) -> dict[str, str]:
        (part, *_) = ExportTraceServiceRequest.FromString(self.bodies[0]).resource_spans
        return {pair.key: pair.value.string_value for pair in part.resource.attributes}


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.bodies.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@pytest.fixture
def collector(set_variables: Callable[..., None]) -> Iterator[Collector]:
    with running_collector() as found:
        set_variables(OTEL_EXPORTER_OTLP_ENDPOINT=found.address)
        yield found


def test_a_request_has_a_span_for_each_stage(collector: Collector, tmp_path: Path) -> None:
    """The scripted engine says that the request waited one second for the fetch and one in the queue, and so on."""
    tracing = open_otel_tracing({})
    engine = ScriptedEngine([deltas_of(b"hi")])
    with running_platform(tmp_path, engine, tracing=tracing) as platform:
        key = platform.key("acme")
        tenant = platform.tenant_id("acme")
        client = platform.api(key)
        client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
        body = {"model": "base", "prompt": SECRET, "max_tokens": 4}
        answer = client.post("/v1/completions", json=body)
        client.get("/healthz")
        refused = client.post("/v1/completions", json={"model": SECRET.replace(" ", "-"), "prompt": "x"})
    tracing.close()
    assert (answer.status_code, refused.status_code) == (200, 404)
    spans = {
        span.name: span for span in collector.spans if span.trace_id.hex() == TRACE and span.name != "POST"
    }
    posts = [span for span in collector.spans if span.name == "POST /v1/completions"]
    assert len(posts) == 2, "probes are not traced"
    whole, failed = sorted(posts, key=lambda span: span.start_time_unix_nano)
    assert whole.parent_span_id.hex() == PARENT and whole.kind == Span.SPAN_KIND_SERVER
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    assert attributes(whole) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "slora.request_id": answer.headers["x-request-id"],
        "slora.tenant": "acme",
        "slora.tenant_id": tenant,
    }
    assert attributes(failed)["http.response.status_code"] == 404
    generate = spans["generate"]
    assert generate.parent_span_id == whole.span_id and seconds(generate) == pytest.approx(10, abs=1e-3)
    assert attributes(generate)["slora.tenant_id"] == tenant
    assert attributes(generate)["gen_ai.usage.input_tokens"] == len(SECRET)
    assert "slora.adapter" not in attributes(generate), "the base model"
    stages = {name: span for name, span in spans.items() if span.parent_span_id == generate.span_id}
    expected = {"adapter fetch": 1, "queue": 1, "prefill": 3, "decode": 4}
    assert {name: round(seconds(span), 3) for name, span in stages.items()} == expected
    ends = [stages[name].end_time_unix_nano for name in expected]
    assert ends == sorted(ends)
    assert collector.resource["service.name"] == "slora"
    for secret in (SECRET, key, ADMIN_KEY, "secret"):
        assert not any(secret.encode() in body for body in collector.bodies)


def test_the_environment_decides_whether_spans_are_exported(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_open(**variables: str) -> bool:
        async with AsyncExitStack() as stack:
            return open_tracing(stack, variables) is not None

    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address}
    assert not asyncio.run(is_open())
    assert asyncio.run(is_open(**endpoint))
    assert not asyncio.run(is_open(**endpoint, OTEL_SDK_DISABLED="true"))
    assert not asyncio.run(is_open(**endpoint, OTEL_TRACES_EXPORTER="none"))
    with pytest.raises(ValueError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'.*4318"):
        asyncio.run(is_open(**endpoint, OTEL_EXPORTER_OTLP_PROTOCOL="grpc"))

    def import_nothing(name: str) -> None:
        raise ModuleNotFoundError(name="opentelemetry.sdk")

    monkeypatch.setattr(store_url.importlib, "import_module", import_nothing)
    with pytest.raises(ValueError, match=r"pip install 'slora\[otel\]'"):
        asyncio.run(is_open(**endpoint))


@pytest.mark.soak
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_exports_the_stages_of_a_cold_and_a_warm_request(
    kit: Kit, tmp_path: Path, workers: str
) -> None:
    with running_collector() as collector:
        env = environment(
            SLORA_ADMIN_KEY=ADMIN_KEY,
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.address,
            OTEL_BSP_SCHEDULE_DELAY="50",
        )
        with serving(kit.base, tmp_path / "data", "--api-workers", workers, env=env) as served:
            served.wait_until_ready()
            key = served.make_key("acme")
            assert upload(served, key, "traced", kit.wide).status_code == 201
            with served.client(key) as client:
                for _ in range(2):
                    body = {"model": "traced", "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
                    assert client.post("/v1/completions", json=body).status_code == 200
            served.wait_until_ready()
        generated = sorted(
            (span for span in collector.spans if span.name == "generate"),
            key=lambda span: span.start_time_unix_nano,
        )
        # The canary of the upload loads the adapter, too, so both requests may be warm.
        assert [attributes(span)["gen_ai.usage.output_tokens"] for span in generated] == [4, 4]
        stages = [span for span in collector.spans if span.parent_span_id == generated[-1].span_id]
        assert {"queue", "prefill", "decode"} <= {span.name for span in stages}
        for span in stages:
            assert generated[-1].start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= generated[-1].end_time_unix_nano
