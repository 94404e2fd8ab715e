"""The adapters and the requests that a plan is made for."""

from collections import Counter
from dataclasses import dataclass, replace

from slora.errors import ConfigError
from slora.simulation.lengths import LengthPair
from slora.simulation.traces import Trace, TraceRequest, base_trace, zipf_trace
from slora_kernels.layout import ModelShape

__all__ = ["Adapters", "Load", "find_modules", "share_trace"]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
# Prompts and answers are at most this many times their mean length.
_LONGEST = 8


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a plan.

    count: number of adapters. ranks: adapter i has rank `ranks[i % len(ranks)]`.
    targets: names of modules, as in PEFT's target_modules, or `attention` or `all-linear`.
    alpha: the popularity of adapter k (from 1) is proportional to k ** -alpha; with 0, all are equally popular.
    """

    count: int
    ranks: tuple[int, ...] = (16,)
    targets: tuple[str, ...] = ("all-linear",)
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a plan.

    rate: requests per second. prompt_tokens, output_tokens: mean lengths. trace: the requests; empty if synthetic.
    """

    rate: float
    prompt_tokens: int
    output_tokens: int
    trace: tuple[TraceRequest, ...] = ()

    @staticmethod
    def of_trace(trace: Trace) -> "Load":
        """Makes a load from a trace. Raises ConfigError if all requests arrive at the same time."""
        first, last = trace[0].arrival_s, trace[-1].arrival_s
        if last <= first:
            raise ConfigError(
                f"all {len(trace)} requests of the trace arrive at {first:g} s; a trace must span some time"
            )
        count = len(trace)
        return Load(
            (count - 1) / (last - first),
            round(sum(request.prompt_tokens for request in trace) / count),
            round(sum(request.output_tokens for request in trace) / count),
            tuple(replace(request, arrival_s=request.arrival_s - first) for request in trace),
        )

    def make_trace(self, adapters: Adapters, count: int, max_model_len: int, seed: int = 0) -> Trace:
        """Returns `count` requests, or fewer if the trace is shorter. Synthetic requests fit into `max_model_len`."""
        if self.trace:
            return list(self.trace[:count])
        whole = self.prompt_tokens + self.output_tokens
        longest = min(_LONGEST, max_model_len / whole)
        lengths = LengthPair(
            "mean lengths",
            self.prompt_tokens,
            self.output_tokens,
            most_prompt=max(1, int(longest * self.prompt_tokens)),
            most_output=max(1, int(longest * self.output_tokens)),
        )
        if not adapters.count:
            return base_trace(count, self.rate, lengths, seed=seed)
        seconds = (count + 0.5) / self.rate
        return zipf_trace(
            adapters.count, self.rate, seconds, alpha=adapters.alpha, lengths=lengths, seed=seed
        )


def find_modules(shape: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the paths of the targeted modules. Raises ConfigError for a target that matches no module."""
    paths = [*(linear.path for linear in shape.linears), shape.embedding_path, shape.head_path]
    linears = paths[:-2]
    found: list[str] = []
    for target in targets:
        if target == "all-linear":
            found += linears
            continue
        names = _ATTENTION if target == "attention" else (target,)
        matched = [path for path in paths if path in names or path.rpartition(".")[2] in names]
        if not matched:
            known = ", ".join(path.rpartition(".")[2] for path in paths)
            raise ConfigError(
                f"target {target!r} matches no module of this model; give attention, all-linear, or some of {known}"
            )
        found += matched
    return tuple(dict.fromkeys(found))


def share_trace(trace: Trace, num_engines: int) -> Trace:
    """Returns the requests of the busiest engine, if each adapter is on one of `num_engines` engines.

    The most requested adapters are assigned first, each to the least loaded engine. Requests for the base model go to
    the engines in turn.
    """
    if num_engines == 1:
        return trace
    counts = Counter(request.adapter for request in trace if request.adapter is not None)
    loads, engine_of = [0] * num_engines, {}
    for adapter, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        engine_of[adapter] = engine = min(range(num_engines), key=loads.__getitem__)
        loads[engine] += count
    busiest = max(range(num_engines), key=loads.__getitem__)
    shared, num_base = [], 0
    for request in trace:
        if request.adapter is None:
            engine, num_base = num_base % num_engines, num_base + 1
        else:
            engine = engine_of[request.adapter]
        if engine == busiest:
            shared.append(request)
    return shared
