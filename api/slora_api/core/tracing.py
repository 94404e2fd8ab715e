"""Opens the export of spans if the environment configures it. OpenTelemetry's SDK is an optional package, which is
imported only in this case.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from slora_adapters.store.store_url import load_optional
from slora_api.core.threads import control_thread

if TYPE_CHECKING:
    from slora_api.core.otel_tracing import OtelTracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def open_tracing(stack: AsyncExitStack, environment: Mapping[str, str]) -> "OtelTracing | None":
    """Returns the export of spans, which the stack closes. Returns None if no endpoint is set, or if OTEL_SDK_DISABLED
    or OTEL_TRACES_EXPORTER=none turns the export off.

    Raises ValueError if the extra `otel` is not installed, or for a setting that is not supported.
    """
    endpoint = next((name for name in _ENDPOINTS if environment.get(name)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None or is_off or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    module = load_optional("slora_api.core.otel_tracing", "otel", endpoint)
    tracing = module.open_otel_tracing(environment)
    stack.push_async_callback(control_thread, tracing.close)
    opened: OtelTracing = tracing
    return opened
