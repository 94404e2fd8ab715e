"""The figures of a serving run, by the definitions of `vllm bench serve`.

TTFT: first chunk - sending. ITL: gaps between chunks, of all requests together. E2E: last chunk - sending. TPOT: (E2E -
TTFT) / (tokens - 1), of a request with more than one token. Goodput: requests that met all of the limits, per second of
the whole run. Beside those: the send lag (how late an open loop's request was sent; a client that is late measures too
short times), times by tenant, Jain's index of the speeds that tenants saw, and TTFT of cold and warm adapters.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.simulation.request_log import percentile
from bench.sse_client import Answer
from bench.table import Row

__all__ = ["Limits", "Served", "jain_index", "serving_row", "tenant_rows"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a request must meet to count for the goodput."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a run.

    due_at: its time in the trace, on `time.perf_counter`. is_cold: whether it is the first request of its adapter.
    """

    tenant: int
    due_at: float
    is_cold: bool
    answer: Answer

    @property
    def send_lag_s(self) -> float:
        return self.answer.sent_at - self.due_at

    @property
    def ttft_s(self) -> float:
        return self.answer.chunks_at[0] - self.answer.sent_at

    @property
    def e2e_s(self) -> float:
        return self.answer.chunks_at[-1] - self.answer.sent_at

    @property
    def tpot_s(self) -> float:
        """0 for an answer of one token, as in vLLM."""
        tokens = self.answer.num_tokens
        return (self.e2e_s - self.ttft_s) / (tokens - 1) if tokens > 1 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        chunks = self.answer.chunks_at
        return [after - before for before, after in pairwise(chunks)]

    def is_good(self, limits: Limits) -> bool:
        return self.answer.is_complete and self.ttft_s <= limits.ttft_s and self.tpot_s <= limits.tpot_s


def serving_row(served: Sequence[Served], seconds: float, limits: Limits) -> Row:
    """seconds: of the whole run, from the first request until the last answer's end."""
    done = [one for one in served if one.answer.is_complete]
    ttfts, gaps = _ms([one.ttft_s for one in done]), _ms([gap for one in done for gap in one.gaps_s])
    e2es, lags = _ms([one.e2e_s for one in done]), _ms([one.send_lag_s for one in served])
    speeds = _speeds(done)
    return {
        "requests": len(served),
        "failed": len(served) - len(done),
        "requests/s": len(done) / seconds,
        "tokens/s": sum(one.answer.num_tokens for one in done) / seconds,
        "goodput/s": sum(one.is_good(limits) for one in served) / seconds,
        "TTFT p50 ms": percentile(ttfts, 50),
        "TTFT p99 ms": percentile(ttfts, 99),
        "TPOT p50 ms": percentile(_ms([one.tpot_s for one in done if one.answer.num_tokens > 1]), 50),
        "ITL p50 ms": percentile(gaps, 50),
        "ITL p99 ms": percentile(gaps, 99),
        "E2E p50 ms": percentile(e2es, 50),
        "E2E p99 ms": percentile(e2es, 99),
        "send lag p99 ms": percentile(lags, 99),
        "cold TTFT p50 ms": percentile(_ms([one.ttft_s for one in done if one.is_cold]), 50),
        "warm TTFT p50 ms": percentile(_ms([one.ttft_s for one in done if not one.is_cold]), 50),
        "Jain": jain_index(list(speeds.values())),
    }


def tenant_rows(served: Sequence[Served], most: int = 10) -> list[Row]:
    """Returns one row for each of the tenants with the most requests."""
    by_tenant: dict[int, list[Served]] = defaultdict(list)
    for one in served:
        by_tenant[one.tenant].append(one)
    largest = sorted(by_tenant.items(), key=lambda item: (-len(item[1]), item[0]))[:most]
    return [_tenant_row(tenant, requests) for tenant, requests in largest]


def _tenant_row(tenant: int, requests: Sequence[Served]) -> Row:
    done = [one for one in requests if one.answer.is_complete]
    ttfts, e2es = _ms([one.ttft_s for one in done]), _ms([one.e2e_s for one in done])
    return {
        "tenant": tenant,
        "requests": len(requests),
        "failed": len(requests) - len(done),
        "TTFT p50 ms": percentile(ttfts, 50),
        "TTFT p99 ms": percentile(ttfts, 99),
        "E2E p50 ms": percentile(e2es, 50),
        "E2E p99 ms": percentile(e2es, 99),
        "tokens/s seen": _speeds(done).get(tenant),
    }


def jain_index(values: Sequence[float]) -> float:
    """1 if all are equal, 1/n if one has everything. Worked example: 1, 1 and 4 are 36 / (3 * 18) = 0.667."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _speeds(done: Sequence[Served]) -> dict[int, float]:
    """For each tenant, the tokens of its answers over the seconds that it waited for them."""
    tokens: dict[int, int] = defaultdict(int)
    waited_s: dict[int, float] = defaultdict(float)
    for one in done:
        tokens[one.tenant] += one.answer.num_tokens
        waited_s[one.tenant] += one.e2e_s
    return {tenant: tokens[tenant] / seconds for tenant, seconds in waited_s.items() if seconds}


def _ms(seconds: Sequence[float]) -> list[float]:
    return sorted(1e3 * value for value in seconds)
