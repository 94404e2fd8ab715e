"""The outcome of each request of a simulation, and the statistics over all of them."""

import statistics
from dataclasses import dataclass, field

from bench.simulation.traces import TraceRequest

# S-LoRA's service-level objective: the first token within six seconds.
SLO_S = 6.0


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are seconds on the clock of the simulation.

    error: the name of the error that ended the request, if any. gaps_s: times between consecutive outputs.
    """

    request: TraceRequest
    num_choices: int = 1
    first_token_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    num_ended: int = 0
    error: str | None = None
    last_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def latency_s(self) -> float | None:
        return None if self.end_s is None or self.error else self.end_s - self.request.arrival_s

    @property
    def is_complete(self) -> bool:
        return self.end_s is not None and self.error is None


@dataclass(frozen=True, slots=True)
class Results:
    """Statistics over all requests.

    attainment: the share of all requests whose first token arrived within the SLO. Refused and aborted requests count
        as misses.

    As in S-LoRA, rates are averages from the start of the clock to the end of the last request. Times are 0 if no
    request has them.
    """

    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_mean_s: float
    latency_p50_s: float
    latency_p99_s: float
    attainment: float


def summarize(outcomes: list[Outcome], slo_s: float = SLO_S) -> Results:
    complete = [one for one in outcomes if one.is_complete]
    duration = max((one.end_s for one in outcomes if one.end_s is not None), default=0.0)
    ttfts = sorted(one.ttft_s for one in outcomes if one.ttft_s is not None)
    latencies = sorted(one.latency_s for one in outcomes if one.latency_s is not None)
    errors: dict[str, int] = {}
    for one in outcomes:
        if one.error is not None:
            errors[one.error] = errors.get(one.error, 0) + 1
    return Results(
        requests=len(outcomes),
        completed=len(complete),
        errors=errors,
        duration_s=duration,
        requests_per_s=len(complete) / duration if duration else 0.0,
        output_tokens_per_s=sum(one.num_tokens for one in complete) / duration if duration else 0.0,
        ttft_mean_s=statistics.fmean(ttfts) if ttfts else 0.0,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        latency_mean_s=statistics.fmean(latencies) if latencies else 0.0,
        latency_p50_s=percentile(latencies, 50),
        latency_p99_s=percentile(latencies, 99),
        attainment=sum(t < slo_s for t in ttfts) / len(outcomes) if outcomes else 0.0,
    )


def percentile(ordered: list[float], percent: float) -> float:
    """The percentile of an ordered list by nearest rank; 0 for an empty list."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
