"""An engine whose steps are made one by one on the caller's thread, its adapters packed on the host beforehand."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slora import SamplingParams
from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest, StepOutput, WeightedAdapter, compose_adapters
from slora.engine.engine import Engine
from slora.models.model_spec import read_model_spec
from slora_adapters.loader.source import DirectorySource
from slora_adapters.peft.peft_directory import read_adapter


class SteppedEngine:
    """settings: EngineConfig's. One adapter for each of `adapters`, its own copy even where a directory comes twice."""

    def __init__(self, model: Path, adapters: Sequence[Path], settings: dict[str, Any]) -> None:
        # The same prompts come again and again: nobody shall find them computed.
        config = EngineConfig(model, **{"prefix_cache": "off", **settings})
        spec = read_model_spec(model, config.model_impl)
        dtype = spec.resolve_dtype(config.dtype)
        shape = spec.shape(dtype)
        source = DirectorySource(shape, dtype, num_threads=0)
        read = {path: read_adapter(path, shape, source.limits) for path in set(adapters)}
        # A version is one tenant's: the same weights of two tenants are two adapters, on the host and in the pool.
        self._versions = [
            source.hold(read[path], tenant=f"tenant-{index}") for index, path in enumerate(adapters)
        ]
        self.engine = Engine(config, spec, source)
        self._numbers = itertools.count()
        self._unfinished: list[str] = []

    def add(
        self,
        prompts: Sequence[list[int]],
        adapters: Sequence[tuple[int, ...]],
        output_tokens: int,
        temperature: float = 0.0,
    ) -> list[str]:
        """Adds requests and returns their ids.

        adapters: of each prompt, by number; several are added up, and none is the base.
        """
        params = SamplingParams(max_tokens=output_tokens, temperature=temperature, seed=1, ignore_eos=True)
        names = []
        for prompt, numbers in zip(prompts, adapters, strict=True):
            composed = compose_adapters(WeightedAdapter(self._versions[number]) for number in numbers)
            request = EngineRequest(str(next(self._numbers)), "bench", prompt, composed, params)
            self.engine.add(request)
            names.append(request.request_id)
        self._unfinished += names
        return names

    def step(self) -> list[StepOutput]:
        """Raises what ended a request."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def drop(self) -> None:
        """Ends what is unfinished."""
        for number in self._unfinished:
            self.engine.abort(number)
        self._unfinished.clear()

    def finish(self) -> int:
        """The number of tokens that came until nothing was left to do."""
        count = 0
        while self.engine.num_unfinished:
            count += len(self.step())
        self._unfinished.clear()
        return count
