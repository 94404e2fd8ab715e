"""The engine as a library: one call, many prompts, each with its own adapter or none.

    llm = LLM("path/to/model")
    outputs = llm.generate(["one", "two"], SamplingParams(max_tokens=8), adapters=["path/to/adapter", None])

Needs no HTTP stack and no database: adapters come from PEFT directories.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slora.detokenizer import Detokenizer
from slora.engine import Engine
from slora.engine_config import EngineConfig
from slora.engine_info import EngineInfo, EngineStats
from slora.errors import ConfigError, RequestRefused
from slora.model_config import ModelConfig
from slora.request import EngineRequest, FinishReason, StepOutput, TokenLogprobs
from slora.sampling_params import SamplingParams
from slora.tokenizer import Tokenizer
from slora_adapters.limits import AdapterLimits
from slora_adapters.source import DirectorySource
from slora_adapters.version import AdapterVersion

AdapterPath = str | os.PathLike[str]
Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `token_ids` includes the token that stopped it; `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class LLM:
    """A model with its pool. Settings not named here are EngineConfig's, by keyword."""

    def __init__(
        self, model: AdapterPath, *, dtype: str = "auto", device: str = "auto", **settings: int | str | None
    ) -> None:
        config = EngineConfig(Path(model), dtype=dtype, device=device, **settings)  # type: ignore[arg-type]
        model_config = ModelConfig.from_directory(config.model)
        dtype_name = model_config.resolve_dtype(dtype)
        limits = AdapterLimits(max_lora_rank=config.max_lora_rank, served_dtype=dtype_name)
        # Loads happen inside `request`: without other work to go on with, a thread would only add waiting.
        self._source = DirectorySource(model_config.shape(dtype_name), dtype_name, limits, num_threads=0)
        self._engine = Engine(config, model_config, self._source)
        self._tokenizer = Tokenizer.from_directory(config.model) if _has_tokenizer(config.model) else None
        self._versions: dict[Path, AdapterVersion] = {}
        self._num_requests = 0

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        adapters: AdapterPath | list[AdapterPath | None] | None = None,
    ) -> list[Completion]:
        """Continues every prompt, text or token ids, and returns the answers in the same order.

        params: one for all, or one for each. adapters: one PEFT directory (or None) for all, or one for each.
        Raises RequestRefused naming what can't be served, AdapterInvalid for a directory that is no valid adapter;
        then no prompt is answered.
        """
        asked = _as_prompts(prompts)
        all_params = _spread(params if params is not None else SamplingParams(), len(asked), "params")
        versions = [self._version(path) for path in _spread(adapters, len(asked), "adapters")]
        requests = [
            self._request(prompt, one, version)
            for prompt, one, version in zip(asked, all_params, versions, strict=True)
        ]
        try:
            for request in requests:
                self._engine.add(request)
            outputs = self._run(
                {request.request_id: _Answer(request, self._tokenizer) for request in requests}
            )
        finally:
            for request in requests:
                self._engine.abort(request.request_id)
        return [outputs[request.request_id].completion() for request in requests]

    def check(self) -> None:
        """Proves that no page of the pool is lost."""
        self._engine.check()

    def _run(self, answers: dict[str, "_Answer"]) -> dict[str, "_Answer"]:
        while self._engine.num_unfinished:
            for output in self._engine.step():
                if answers[output.request_id].take(output):
                    self._engine.abort(output.request_id)
        return answers

    def _version(self, path: AdapterPath | None) -> AdapterVersion | None:
        if path is None:
            return None
        directory = Path(path).resolve()
        if directory not in self._versions:
            self._versions[directory] = self._source.add(directory)
        return self._versions[directory]

    def _request(
        self, prompt: Prompt, params: SamplingParams, version: AdapterVersion | None
    ) -> EngineRequest:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestRefused("this model directory has no tokenizer.json; pass token ids", "prompt")
            token_ids = self._tokenizer.encode(prompt)
        else:
            token_ids = [int(token) for token in prompt]
        if params.stop and self._tokenizer is None:
            raise RequestRefused("stop strings need a tokenizer; use stop_token_ids", "stop")
        self._num_requests += 1
        return EngineRequest(str(self._num_requests), "local", token_ids, version, params)


class _Answer:
    """What one request has produced so far."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason = FinishReason.LENGTH
        self._detokenizer = Detokenizer(tokenizer, request.sampling.stop) if tokenizer is not None else None

    def take(self, output: StepOutput) -> bool:
        """Takes one step's output in; True when a stop string ended the text. Raises the request's error."""
        if output.error is not None:
            raise output.error
        delta = output.delta
        assert delta is not None, "an output has a delta or an error"
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
        if self._detokenizer is None:
            return False
        # The token that stopped the answer is not part of its text.
        stopped = delta.finish_reason is FinishReason.STOP
        self._text += self._detokenizer.push(delta.token_ids[:-1] if stopped else delta.token_ids)
        if delta.finish_reason is not None:
            self._text += self._detokenizer.flush()
        if self._detokenizer.stopped:
            self._reason = FinishReason.STOP
        return self._detokenizer.stopped

    def completion(self) -> Completion:
        return Completion(
            text=self._text,
            token_ids=self._token_ids,
            finish_reason=self._reason,
            prompt_token_ids=self._request.prompt_token_ids,
            logprobs=self._logprobs if self._request.sampling.logprobs is not None else None,
        )


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is one prompt; anything else is a list of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(value: T | list[T] | tuple[T, ...], count: int, name: str) -> list[T]:
    """One for all, or one for each."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise ConfigError(
                f"{name} has {len(value)} entries for {count} prompts; give one for all or one for each"
            )
        return list(value)
    return [value] * count
