"""Exports spans of requests with OpenTelemetry.

The engine does not use OpenTelemetry. It reports the times of a request's stages, and the API process makes spans from
these times.

    POST /v1/chat/completions      from the request to the end of its answer
      generate                     one for each prompt, from arrival in the engine to the last token
        adapter fetch              until its adapters were on the host
        queue                      until it joined the batch
        adapter load               until its adapters were in the pool
        prefill                    until the first token
        decode                     until the last token

The SDK reads the endpoint, headers, sampler, resource and batch sizes from the variables OTEL_*. A thread sends the
spans. If the collector is slow, spans are dropped. Spans contain no prompts, answers, keys or paths.
"""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from slora.core.request import EngineRequest, RequestTiming, RequestUsage
from slora_api.core.package_version import find_package_version
from slora_api.core.request_context import RequestContext

# Without this exclusion, most of the spans would be of probes and scrapes.
_UNTRACED = frozenset({"/healthz", "/readyz", "/health", "/ping", "/load", "/version", "/metrics"})
_PROPAGATOR = TraceContextTextMapPropagator()
_NS = 1_000_000_000


class OtelTracing:
    """Makes the spans of this process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("slora", find_package_version())

    def begin(self, method: str, path: str, headers: Headers) -> "OtelSpan | None":
        """Begins the span of an HTTP request, as a child of the client's span if `headers` name one. Returns None if
        the request is not traced.
        """
        if path in _UNTRACED:
            return None
        parent = _PROPAGATOR.extract(headers)
        return OtelSpan(self._tracer, method, parent)

    def close(self) -> None:
        """Sends the remaining spans. Waits no longer than the timeout of the exporter."""
        self._provider.shutdown()


class OtelSpan:
    """The span of one HTTP request. Its methods are cheap and never raise."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Any, method: str, parent: Any) -> None:
        self._tracer = tracer
        attributes = {"http.request.method": method}
        self._span: Span = tracer.start_span(method, parent, SpanKind.SERVER, attributes)

    @property
    def traceparent(self) -> str:
        """The value of the W3C header `traceparent` that identifies the span."""
        made = self._span.get_span_context()
        return f"00-{made.trace_id:032x}-{made.span_id:016x}-{made.trace_flags:02x}"

    def add_engine_request(self, request: EngineRequest, usage: RequestUsage, timing: RequestTiming) -> None:
        """Adds a span for each stage of one prompt. The prompt may end after the HTTP request."""
        if not self._span.is_recording() and not self._span.get_span_context().trace_flags.sampled:
            return
        offset_s = time.time() - time.monotonic()
        attributes: dict[str, str | int | bool] = {
            "slora.tenant_id": request.tenant,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.output_tokens": usage.generated_tokens,
            "slora.cached_tokens": usage.cached_tokens,
            "slora.num_preemptions": timing.num_preemptions,
        }
        if (digests := request.adapter_digests) is not None:
            attributes |= {"slora.adapter": digests, "slora.is_cold": timing.is_cold}
        whole = self._add("generate", self._span, timing.arrived_at, timing.ended_at, offset_s, attributes)
        for name, begin, end in _stages(timing):
            self._add(name, whole, begin, end, offset_s, {})

    def end(self, context: RequestContext, route: str, status: int) -> None:
        """Ends the span. status: 0 if the client disconnected before an answer."""
        span = self._span
        if span.is_recording():
            span.update_name(f"{span.attributes['http.request.method']} {route}")  # type: ignore[attr-defined]
            span.set_attributes(
                {
                    "http.route": route,
                    "http.response.status_code": status,
                    "slora.request_id": context.request_id,
                }
            )
            if context.tenant is not None and context.tenant_id is not None:
                span.set_attributes({"slora.tenant": context.tenant, "slora.tenant_id": context.tenant_id})
            if status == 0 or status >= 500:
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _add(
        self,
        name: str,
        parent: Span,
        begin: float,
        end: float,
        offset_s: float,
        attributes: Mapping[str, Any],
    ) -> Span:
        """Adds a span that has ended. begin, end: seconds of `time.monotonic()`."""
        start_ns = int((begin + offset_s) * _NS)
        span: Span = self._tracer.start_span(
            name, set_span_in_context(parent), attributes=attributes, start_time=start_ns
        )
        span.end(int((end + offset_s) * _NS))
        return span


def _stages(timing: RequestTiming) -> list[tuple[str, float, float]]:
    """Returns the stages that the request reached: name, begin and end."""
    fetched_at = min(timing.arrived_at + timing.fetch_s, timing.ended_at)
    admitted_at = timing.ended_at if timing.admitted_at is None else timing.admitted_at
    stages = [("queue", fetched_at, max(fetched_at, admitted_at))]
    if timing.fetch_s:
        stages.insert(0, ("adapter fetch", timing.arrived_at, fetched_at))
    if timing.is_cold and timing.load_s:
        stages.append(("adapter load", admitted_at, admitted_at + timing.load_s))
    if timing.computed_at is not None:
        first_token_at = timing.ended_at if timing.first_token_at is None else timing.first_token_at
        stages.append(("prefill", timing.computed_at, first_token_at))
    if timing.first_token_at is not None:
        stages.append(("decode", timing.first_token_at, timing.ended_at))
    return stages


def open_otel_tracing(environment: Mapping[str, str]) -> OtelTracing:
    """Opens the export that OTEL_* variables configure. Raises ValueError for a protocol that is not supported."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(name, "http/protobuf")
        if protocol != "http/protobuf":
            raise ValueError(
                f"{name} is {protocol!r}, but spans are exported by http/protobuf only: remove the variable, and let "
                "the endpoint be the collector's port for HTTP (4318)"
            )
    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {SERVICE_NAME: "slora"})
    # The SDK need not react to the end of the process, because the server calls `close` when it stops.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracing(provider)
