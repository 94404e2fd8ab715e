"""The stage `peers`: transformers, and peft, on a random model of the same shape; LoRA kernels of vLLM and SGLang.

A module of its own, because transformers and peft take ten seconds to import.

`decode_with_transformers`: its continuous batching with paged attention, the base model.
`generate_with_peft`: requests with adapters in static batches. `one_adapter` is how S-LoRA ran it: requests of one
adapter at a time, switched between batches. `adapter_names` is peft's own way to mix adapters in a batch. A batch is
padded to its longest prompt and generates until its longest answer is complete.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.gpu import peer_kernels
from bench.gpu.decode import KINDS, S1_KIND
from bench.gpu.peer_kernels import PeerTimes
from bench.gpu.peer_sources import PEERS
from bench.gpu.random_engine import EngineSize
from bench.gpu.resumed_table import Case, ResumedTable
from bench.gpu.stages import Bench, Scale, serve
from bench.machines import ATTENTION
from bench.simulation.traces import Trace, TraceRequest, slora_trace
from bench.table import Row
from bench.workload import prompts
from slora_kernels.kernel_selector import select_kernels

# Otherwise transformers takes nine tenths of the free memory.
_BLOCK_TOKENS = 256
ONE_ADAPTER, ADAPTER_NAMES = "peft, one adapter", "peft, adapter_names"


def make_model(size: EngineSize, attention: str = "sdpa") -> Any:
    fields = dict(size.fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(size.device):
        # Weights are made in float32 unless the default is changed, and float32 has no room on the card.
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, size.dtype))
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        finally:
            torch.set_default_dtype(before)
    return model.to(getattr(torch, size.dtype)).eval()


def decode_with_transformers(
    model: Any, batch: int, prompt_tokens: int, output_tokens: tuple[int, int]
) -> Row:
    """Times two runs of the same requests with fewer and more tokens. The difference is of decode steps alone."""
    vocab_size = model.config.vocab_size
    asked = prompts(batch, prompt_tokens, vocab_size)
    blocks = -(-(prompt_tokens + output_tokens[1]) // _BLOCK_TOKENS)
    settings = ContinuousBatchingConfig(
        block_size=_BLOCK_TOKENS,
        num_blocks=(batch + 1) * (blocks + 1),
        max_batch_tokens=max(256, batch * prompt_tokens),
        allow_block_sharing=False,
    )
    seconds = []
    for count in (output_tokens[0], *output_tokens):
        wanted = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1
        )
        start = time.perf_counter()
        done = model.generate_batch(asked, generation_config=wanted, continuous_batching_config=settings)
        seconds.append(time.perf_counter() - start)
        lengths = {len(one.generated_tokens) for one in done.values()}
        assert len(done) == batch and lengths == {count}, f"answers have {lengths} tokens, not {count}"
    steps = output_tokens[1] - output_tokens[0]
    step_s = (seconds[2] - seconds[1]) / steps
    return {
        "step ms": 1e3 * step_s,
        "tokens/s": batch / step_s,
        "whole tokens/s": batch * output_tokens[1] / seconds[2],
        "first s": seconds[0],
        "attention": model.config._attn_implementation,
    }


class PeftGeneration:
    def __init__(self, size: EngineSize, num_adapters: int, rank: int, adapted: Sequence[str]) -> None:
        self._device = torch.device(size.device)
        model = make_model(size)
        self._vocab_size = model.config.vocab_size
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            target_modules=[path.split(".")[1] for path in adapted],
            init_lora_weights=False,
        )
        with self._device:
            self._model: Any = peft.PeftModelForCausalLM(model, lora, "a0", autocast_adapter_dtype=False)
            for number in range(1, num_adapters):
                self._model.add_adapter(f"a{number}", lora)
        self._model.to(getattr(torch, size.dtype)).eval()

    def measure(self, way: str, trace: Trace, batch: int, num_batches: int) -> Row:
        """Of requests that are all there: the first `num_batches` of at most `batch` each."""
        done: list[TraceRequest] = []
        batches = self._batches(way, trace, batch)[:num_batches]
        self._generate(way, batches[0], 2)  # what a first call sets up
        start = time.perf_counter()
        for requests in batches:
            self._generate(way, requests, max(one.output_tokens for one in requests))
            done += requests
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - start
        tokens = sum(request.output_tokens for request in done)
        return {"requests": len(done), "requests/s": len(done) / seconds, "tokens/s": tokens / seconds}

    def _batches(self, way: str, trace: Trace, batch: int) -> list[list[TraceRequest]]:
        if way == ADAPTER_NAMES:
            return _cut(trace, batch)
        by_adapter: dict[int | None, list[TraceRequest]] = defaultdict(list)
        for request in trace:
            by_adapter[request.adapter].append(request)
        return [part for group in by_adapter.values() for part in _cut(group, batch)]

    def _generate(self, way: str, requests: Sequence[TraceRequest], num_tokens: int) -> None:
        longest = max(request.prompt_tokens for request in requests)
        asked = [[token % self._vocab_size for token in request.prompt()] for request in requests]
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in asked], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in asked], device=self._device)
        chosen = {}
        if way == ADAPTER_NAMES:
            chosen = {"adapter_names": [f"a{request.adapter}" for request in requests]}
        else:
            self._model.set_adapter(f"a{requests[0].adapter}")
        with torch.inference_mode():
            self._model.generate(
                input_ids=padded,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                **chosen,
            )


def _cut(trace: Trace, size: int) -> list[Trace]:
    return [trace[first : first + size] for first in range(0, len(trace), size)]


def measure_peers(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    return table.fill(_peer_cases(bench), seconds, errors=True)


def _peer_cases(bench: Bench) -> Iterator[Case]:
    scale = bench.scale
    yield (
        {"case": "transformers, continuous batching", "batch": scale.peer_batch},
        partial(_batch_by_transformers, scale),
    )
    yield from _peer_kernel_cases(bench)
    yield {"case": ONE_ADAPTER, "adapters": scale.contest[0]}, partial(_contend_with_peft, scale)


def _batch_by_transformers(scale: Scale) -> Row:
    model = make_model(scale.size, "paged|sdpa")
    try:
        return decode_with_transformers(
            model, scale.peer_batch, scale.decode.prompt_tokens, scale.peer_tokens
        )
    finally:
        del model
        _free_memory(scale)


def _peer_kernel_cases(bench: Bench) -> Iterator[Case]:
    is_small = bench.device.type != "cuda"
    kernels = select_kernels(bench.scale.kernel_name, bench.device)
    if bench.peers is None:
        return
    for name, make in PEERS.items():
        sizes = peer_kernels.SMALL if is_small else peer_kernels.WHOLE
        times = PeerTimes(sizes, bench.device, kernels, {name: partial(make, bench.peers)})
        for key, measure in times.cases():
            yield {"case": f"kernels of {name}", **key}, measure


def _contend_with_peft(scale: Scale) -> Row:
    adapters, requests = scale.contest
    lengths = scale.load.lengths
    try:
        model = PeftGeneration(scale.size, adapters, KINDS[S1_KIND].rank, ATTENTION)
        trace = slora_trace(
            adapters, 1e3 * 12 * adapters, 1e-3, lengths=(lengths[0], max(lengths[0] + 1, lengths[1] // 2))
        )
        return model.measure(ONE_ADAPTER, trace, requests, 1)
    finally:
        _free_memory(scale)


def _free_memory(scale: Scale) -> None:
    if scale.size.device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    serve({"peers": measure_peers})
