"""transformers + peft on the same random model: adapters beside it in memory, requests in static batches.

`one_adapter` is how S-LoRA ran it: requests of one adapter at a time, switched between batches. `adapter_names` is
peft's own way to mix adapters in a batch. A batch is padded to its longest prompt and generates until its longest
answer is done; no paging, and nobody joins.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu.random_engine import EngineSize
from bench.simulation.traces import Trace, TraceRequest
from bench.table import Row

ONE_ADAPTER, ADAPTER_NAMES = "peft, one adapter", "peft, adapter_names"


class PeftGeneration:
    def __init__(self, size: EngineSize, num_adapters: int, rank: int, adapted: Sequence[str]) -> None:
        fields = dict(size.fields)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        self._device = torch.device(size.device)
        self._vocab_size = config.vocab_size
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            target_modules=[path.split(".")[1] for path in adapted],
            init_lora_weights=False,
        )
        torch.manual_seed(0)
        with self._device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, size.dtype)).eval()
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
        self._synchronize()
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
        prompts = [[token % self._vocab_size for token in request.prompt()] for request in requests]
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
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

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _cut(trace: Trace, size: int) -> list[Trace]:
    return [trace[first : first + size] for first in range(0, len(trace), size)]
