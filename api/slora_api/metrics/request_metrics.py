"""Histograms of the stages of requests. The engine reports the times of a request when it ends."""

from typing import Literal

from prometheus_client import CollectorRegistry, Histogram

from slora.core.request import EngineRequest, RequestTiming, RequestUsage

# The labels of vLLM's metrics. A server has one engine.
VLLM_LABELS = ("model_name", "engine")
ENGINE = "0"
# The buckets of vLLM's histograms. Histograms of several servers can be summed only if their buckets are the same.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)

_Start = Literal["base", "warm", "cold"]


class RequestMetrics:
    """Histograms with one observation for each engine request, that is, for each prompt. Lines of batches are left out,
    because they may wait for hours.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def of_vllm(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, VLLM_LABELS, registry=registry, buckets=buckets)
            return family.labels(model_name, ENGINE)

        self._queue = of_vllm(
            "request_queue_time_seconds",
            "From arrival in the engine to the first computed token, waits for adapters included.",
            LATENCY_S,
        )
        self._prefill = of_vllm(
            "request_prefill_time_seconds",
            "From the first computed prompt token to the first generated token.",
            LATENCY_S,
        )
        self._decode = of_vllm(
            "request_decode_time_seconds", "From the first token to the last one.", LATENCY_S
        )
        self._inference = of_vllm(
            "request_inference_time_seconds", "From the first computed token to the last token.", LATENCY_S
        )
        self._token_time = of_vllm(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a request with one choice.",
            _TOKEN_GAP_S,
        )
        self._prompt_tokens = of_vllm("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = of_vllm("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._max_tokens = of_vllm(
            "request_params_max_tokens", "Limit of the tokens of an answer (max_tokens).", _TOKENS
        )
        self._choices = of_vllm("request_params_n", "Answers that a request asks for.", _CHOICES)
        self._preemptions = of_vllm(
            "request_num_preemptions", "Preemptions of all sequences of a request.", _PREEMPTIONS
        )
        first_token = Histogram(
            "slora_first_token_seconds",
            "From arrival in the engine to the first token. Start is base (no adapter), warm (its adapters were in "
            "the pool) or cold (it waited for an adapter).",
            ["start"],
            registry=registry,
            buckets=FIRST_TOKEN_S,
        )
        starts: tuple[_Start, ...] = ("base", "warm", "cold")
        self._first_token = {start: first_token.labels(start) for start in starts}
        waits = Histogram(
            "slora_adapter_wait_seconds",
            "Time that a cold request waited for its adapters to come to the host (fetch) and to be loaded into "
            "the pool (load).",
            ["stage"],
            registry=registry,
            buckets=FIRST_TOKEN_S,
        )
        self._fetch, self._load = waits.labels("fetch"), waits.labels("load")

    def count(self, request: EngineRequest, usage: RequestUsage, timing: RequestTiming) -> None:
        """Counts a request that has ended. Stages that the request did not reach are not counted."""
        if request.is_background:
            return
        self._prompt_tokens.observe(len(request.prompt_token_ids))
        self._generated.observe(usage.generated_tokens)
        self._preemptions.observe(timing.num_preemptions)
        if request.pooling is None:
            self._choices.observe(request.sampling.n)
            self._max_tokens.observe(request.sampling.max_tokens or 0)
        if timing.computed_at is None:
            return
        self._queue.observe(timing.computed_at - timing.arrived_at)
        self._inference.observe(timing.ended_at - timing.computed_at)
        if timing.is_cold:
            self._fetch.observe(timing.fetch_s)
            self._load.observe(timing.load_s)
        if timing.first_token_at is None:
            return
        self._prefill.observe(timing.first_token_at - timing.computed_at)
        decode_s = timing.ended_at - timing.first_token_at
        self._decode.observe(decode_s)
        if usage.generated_tokens > 1 and request.sampling.width == 1:
            self._token_time.observe(decode_s / (usage.generated_tokens - 1))
        self._first_token[_start(request, timing)].observe(timing.first_token_at - timing.arrived_at)


def _start(request: EngineRequest, timing: RequestTiming) -> _Start:
    if not request.adapters:
        return "base"
    return "cold" if timing.is_cold else "warm"
