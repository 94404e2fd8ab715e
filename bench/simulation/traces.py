"""Traces: the requests that a simulation or a benchmark replays, with their times. This module does not depend on the
engine.

`slora_trace` is S-LoRA's own generator (its benchmarks/trace.py). With seed 42 it makes the same draws in the same
order, so its traces are identical to S-LoRA's. Its alpha = 1 means uniform popularity: with 200 adapters and 600
requests, the most popular adapter gets 1.3% of them. With alpha = 0.3 it gets 22.5%. `zipf_trace` draws adapters from a
Zipf distribution, as Punica's workload does. `chat_trace` makes conversations whose prompts share prefixes.

A prompt has two parts. The first `shared_tokens` tokens are the same for all requests with the same adapter, like a
system prompt. All further tokens are specific to the request's `thread`. So requests of one thread continue each other.
Other requests with the same adapter share only its `shared_tokens` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.simulation.lengths import SHAREGPT, LengthPair

# Smaller ids are special tokens. A simulated model stops at one of them.
FIRST_TOKEN = 16
SHARED_TOKEN = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    adapter: None for the base model.
    output_tokens: the length of the answer. The simulation decides whether the engine knows it.
    thread: requests with the same thread and adapter continue each other's text.
    shared_tokens: the length of the prefix that the prompt shares with all requests of its adapter.
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
        """The token that fills prompts and answers of this thread after the shared prefix."""
        return FIRST_TOKEN + self.thread

    def prompt(self) -> list[int]:
        shared = min(self.shared_tokens, self.prompt_tokens)
        about = 0 if self.adapter is None else 1 + self.adapter
        return [SHARED_TOKEN + about] * shared + [self.thread_token] * (self.prompt_tokens - shared)


Trace = list[TraceRequest]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the settings of S-LoRA's benchmark. Adapter i has rank ranks[i % len(ranks)]."""

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
    """Makes a trace with S-LoRA's generator.

    Each adapter has a tenant of its own, as in S-LoRA. If `num_tenants` is given, that many tenants share the adapters.

    Worked example: 200 adapters at 2 requests a second for 300 s give 600 requests and 1,026 tokens a second.
    """
    # The same stream as after np.random.seed(seed), without changing the global state.
    random = np.random.RandomState(seed)
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
    """Makes a trace in which adapter k (from 1) is requested in proportion to k ** -alpha. The gaps between requests
    have a gamma distribution with coefficient of variation `cv`.
    """
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
    """Makes a trace of conversations, which begin with their adapter's system prompt. Each turn's prompt contains all
    earlier turns of its conversation.

    `rate` counts requests, so `rate / turns` conversations begin per second. The pauses between turns have an
    exponential distribution with mean `pause_s`. The load is open-loop: a turn does not wait for a late answer.
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
    """Makes a trace of requests to the base model from one tenant, with Poisson arrivals."""
    random = np.random.default_rng(seed)
    prompts, outputs = lengths.draw(count, random)
    columns = zip(gamma_arrivals(count, rate, 1.0, random), prompts, outputs, strict=True)
    return [TraceRequest(now, 0, None, prompt, output, i) for i, (now, prompt, output) in enumerate(columns)]


def gamma_arrivals(count: int, rate: float, cv: float, random: np.random.Generator) -> list[float]:
    """Draws the times of `count` arrivals. cv 1 gives a Poisson process; a larger cv gives burstier arrivals."""
    arrivals: list[float] = np.cumsum(random.gamma(1 / cv**2, cv**2 / rate, count)).tolist()
    return arrivals


def merge(*traces: Trace) -> Trace:
    """Merges traces in order of arrival. Threads are renumbered, so that threads of different traces stay different."""
    merged: Trace = []
    first = 0
    for trace in traces:
        merged += [replace(request, thread=first + request.thread) for request in trace]
        first += 1 + max((request.thread for request in trace), default=-1)
    return sorted(merged, key=lambda request: request.arrival_s)


def offered_tokens_per_s(trace: Trace) -> float:
    """Prompt and answer tokens of the trace, divided by the time of its last arrival."""
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
