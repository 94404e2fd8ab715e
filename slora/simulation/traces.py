"""Requests over time: what a simulation or a bench replays. Nothing here knows an engine.

`slora_trace` is S-LoRA's own generator (its benchmarks/trace.py): seed 42, the same draws in the same order, so that
its traces are reproduced number by number. Mind that its alpha = 1 is uniform popularity: 200 adapters, 600 requests,
and the most popular one gets 1.3% of them; 0.3 gives it 22.5%. `zipf_trace` draws adapters from a Zipf distribution,
as Punica's workload does. `chat_trace` has conversations whose prompts share their beginnings.

A prompt's tokens come in two parts: `shared_tokens` that all requests of its adapter begin with (a system prompt), then
tokens that only its `thread` says. So requests of one thread continue each other, and all others have in common what
they should, whatever a prefix cache makes of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slora.simulation.lengths import SHAREGPT, LengthPair

# Token ids below are left to special tokens: a simulated model stops at one of them.
FIRST_TOKEN = 16
SHARED_TOKEN = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`output_tokens` is how long the answer will be; whether the engine is told is the simulation's choice.

    adapter: None is the bare base. thread: requests of the same one (and adapter) continue each other's text.
    """

    arrival_s: float
    tenant: int
    adapter: int | None
    prompt_tokens: int
    output_tokens: int
    thread: int
    shared_tokens: int = 0

    @property
    def thread_token(self) -> int:
        """The one token that prompt and answer of this thread consist of."""
        return FIRST_TOKEN + self.thread

    def prompt(self) -> list[int]:
        shared = min(self.shared_tokens, self.prompt_tokens)
        about = 0 if self.adapter is None else 1 + self.adapter
        return [SHARED_TOKEN + about] * shared + [self.thread_token] * (self.prompt_tokens - shared)


Trace = list[TraceRequest]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of S-LoRA's: adapter i has rank ranks[i % len(ranks)]."""

    name: str
    ranks: tuple[int, ...]


S1 = Setting("S1", (8,))
S2 = Setting("S2", (64, 32, 16, 8))
S4 = Setting("S4", (64, 32, 16))


def slora_trace(
    num_adapters: int,
    rate: float,
    duration_s: float,
    *,
    alpha: float = 1.0,
    cv: float = 1.0,
    lengths: tuple[int, int] = (8, 512),
    num_tenants: int | None = None,
    seed: int = 42,
) -> Trace:
    """S-LoRA's generator. Each adapter is a tenant of its own, as there, unless `num_tenants` share them.

    Worked example: 200 adapters at 2 requests a second for 300 s: 600 requests, 1,026 tokens a second.
    """
    random = np.random.RandomState(
        seed
    )  # the stream of np.random.seed(seed), without touching the global one
    count = int(rate * duration_s)
    adapters = (random.power(alpha, count) * num_adapters).astype(int).tolist()
    prompts = random.randint(lengths[0], lengths[1], count).tolist()
    outputs = random.randint(lengths[0], lengths[1], count).tolist()
    arrivals = np.cumsum(random.gamma(1 / cv**2, cv**2 / rate, count)).tolist()
    return _assemble(arrivals, adapters, prompts, outputs, num_tenants)


def zipf_trace(
    num_adapters: int,
    rate: float,
    duration_s: float,
    *,
    alpha: float = 1.5,
    cv: float = 1.0,
    lengths: LengthPair = SHAREGPT,
    num_tenants: int | None = None,
    seed: int = 0,
) -> Trace:
    """Adapter k (from 1) is asked for in proportion to k ** -alpha; gaps are gamma distributed with variation `cv`."""
    random = np.random.default_rng(seed)
    count = int(rate * duration_s)
    popularity = np.arange(1, num_adapters + 1, dtype=float) ** -alpha
    adapters = random.choice(num_adapters, count, p=popularity / popularity.sum()).tolist()
    prompts, outputs = lengths.draw(count, random)
    return _assemble(gamma_arrivals(count, rate, cv, random), adapters, prompts, outputs, num_tenants)


def chat_trace(
    num_adapters: int,
    rate: float,
    duration_s: float,
    *,
    alpha: float = 1.0,
    turns: int = 4,
    pause_s: float = 20.0,
    shared_tokens: int = 256,
    lengths: LengthPair = SHAREGPT,
    num_tenants: int | None = None,
    seed: int = 0,
) -> Trace:
    """Conversations: each begins with its adapter's system prompt, each turn with all that was said before.

    `rate` counts requests, so `rate / turns` conversations begin a second. A turn follows `pause_s` (on average,
    exponential) after the one before: an open loop, it does not wait for a late answer.
    """
    random = np.random.default_rng(seed)
    count = max(1, int(rate * duration_s / turns))
    popularity = np.arange(1, num_adapters + 1, dtype=float) ** -alpha
    adapters = random.choice(num_adapters, count, p=popularity / popularity.sum()).tolist()
    starts = gamma_arrivals(count, rate / turns, 1.0, random)
    prompts, outputs = lengths.draw(count * turns, random)
    pauses = random.exponential(pause_s, count * turns).tolist()
    trace: Trace = []
    for thread, (start, adapter) in enumerate(zip(starts, adapters, strict=True)):
        tenant = adapter if num_tenants is None else adapter % num_tenants
        said, now = shared_tokens, start
        for turn in range(thread * turns, (thread + 1) * turns):
            said += prompts[turn]
            trace.append(TraceRequest(now, tenant, adapter, said, outputs[turn], thread, shared_tokens))
            said += outputs[turn]
            now += pauses[turn]
    return sorted(trace, key=lambda request: (request.arrival_s, request.thread))


def base_trace(count: int, rate: float, lengths: LengthPair, *, seed: int = 0) -> Trace:
    """Poisson arrivals for the bare base model, all of one tenant."""
    random = np.random.default_rng(seed)
    prompts, outputs = lengths.draw(count, random)
    columns = zip(gamma_arrivals(count, rate, 1.0, random), prompts, outputs, strict=True)
    return [TraceRequest(now, 0, None, prompt, output, i) for i, (now, prompt, output) in enumerate(columns)]


def gamma_arrivals(count: int, rate: float, cv: float, random: np.random.Generator) -> list[float]:
    """Times of `count` arrivals; cv 1 is a Poisson process, more is burstier."""
    arrivals: list[float] = np.cumsum(random.gamma(1 / cv**2, cv**2 / rate, count)).tolist()
    return arrivals


def merge(*traces: Trace) -> Trace:
    """All requests in order of arrival, threads renumbered so that those of different traces differ."""
    merged: Trace = []
    first = 0
    for trace in traces:
        merged += [replace(request, thread=first + request.thread) for request in trace]
        first += 1 + max((request.thread for request in trace), default=-1)
    return sorted(merged, key=lambda request: request.arrival_s)


def offered_tokens_per_s(trace: Trace) -> float:
    """Prompt and answer tokens over the time of the arrivals."""
    tokens = sum(request.prompt_tokens + request.output_tokens for request in trace)
    return tokens / trace[-1].arrival_s


def _assemble(
    arrivals: Sequence[float],
    adapters: Sequence[int],
    prompts: Sequence[int],
    outputs: Sequence[int],
    num_tenants: int | None,
) -> Trace:
    columns = zip(arrivals, adapters, prompts, outputs, strict=True)
    return [
        TraceRequest(
            arrival,
            adapter if num_tenants is None else adapter % num_tenants,
            adapter,
            prompt,
            output,
            thread,
        )
        for thread, (arrival, adapter, prompt, output) in enumerate(columns)
    ]
