"""The traffic of a fleet, as arrays: millions of requests don't fit in lists of objects."""

from dataclasses import dataclass

import numpy as np

from bench.simulation.lengths import SHAREGPT, FloatArray, IntArray, LengthPair, draw_lengths
from bench.simulation.traces import Trace


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival; one entry per request in each array."""

    arrival_s: FloatArray
    adapter: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def total_tokens(self) -> IntArray:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """How much is requested, of what and when.

    rate: mean requests per second, without those of `viral`. swing: the relative amplitude of a sine of one period per
        `duration_s`, which is the lowest at the start.
    alpha: the adapter of popularity rank k (from 1) is requested in proportion to k ** -alpha.
    shift_s: after each such time, a tenth of the adapters swap their popularity with others; None: never.
    viral: (from_s, until_s, share): in this time, more requests come, and all of them go to the adapter which was the
        least popular before. They are this share of all requests.
    """

    num_adapters: int
    rate: float
    duration_s: float
    alpha: float = 1.0
    swing: float = 0.0
    shift_s: float | None = None
    viral: tuple[float, float, float] | None = None
    lengths: LengthPair = SHAREGPT


def make_traffic(demand: Demand, seed: int = 0) -> Traffic:
    random = np.random.default_rng(seed)
    arrivals = _draw_arrivals(demand, random)
    count = len(arrivals)
    popularity = np.cumsum(np.arange(1, demand.num_adapters + 1, dtype=float) ** -demand.alpha)
    ranks = np.searchsorted(popularity, random.random(count) * popularity[-1])
    adapters = _name_adapters(demand, arrivals, np.minimum(ranks, demand.num_adapters - 1), random)
    if demand.viral is not None:
        from_s, until_s, share = demand.viral
        hit = (arrivals >= from_s) & (arrivals < until_s) & (random.random(count) < share)
        adapters[hit] = demand.num_adapters - 1
    lengths = demand.lengths
    prompts = draw_lengths(count, lengths.prompt_mean, random, lengths.prompts, lengths.most_prompt)
    outputs = draw_lengths(count, lengths.output_mean, random, lengths.outputs, lengths.most_output)
    return Traffic(arrivals, adapters, np.array(prompts, np.int64), np.array(outputs, np.int64))


def read_trace_arrays(trace: Trace) -> Traffic:
    """Every request of the trace must have an adapter."""
    rows = [(r.adapter, r.prompt_tokens, r.output_tokens) for r in trace]
    columns = np.array(rows, np.int64).reshape(-1, 3)
    return Traffic(np.array([r.arrival_s for r in trace]), *(columns[:, i] for i in range(3)))


def _draw_arrivals(demand: Demand, random: np.random.Generator) -> FloatArray:
    """Draws a Poisson process whose rate follows the time of day."""
    grid = np.linspace(0.0, demand.duration_s, 1001)
    rates = 1 - demand.swing * np.cos(2 * np.pi * grid / demand.duration_s)
    if demand.viral is not None:
        from_s, until_s, share = demand.viral
        rates[(grid >= from_s) & (grid < until_s)] /= 1 - share
    expected = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2)]) / 1000
    count = random.poisson(demand.rate * demand.duration_s * expected[-1])
    arrivals: FloatArray = np.interp(np.sort(random.random(count)), expected / expected[-1], grid)
    return arrivals


def _name_adapters(
    demand: Demand, arrivals: FloatArray, ranks: IntArray, random: np.random.Generator
) -> IntArray:
    names = np.arange(demand.num_adapters)
    if demand.shift_s is None:
        return names[ranks]
    adapters = np.empty_like(ranks)
    periods = (arrivals / demand.shift_s).astype(int)
    for period in range(int(demand.duration_s / demand.shift_s) + 1):
        if period:
            moved = random.random(demand.num_adapters) < 0.1
            names[moved] = random.permutation(names[moved])
        chosen = periods == period
        adapters[chosen] = names[ranks[chosen]]
    return adapters
