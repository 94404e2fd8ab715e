"""Turns prompts, conversations and adapters of a library user into engine requests, each with an `Answer` to fill.

`LLM` and `AsyncLLM` share this class, so both accept and refuse the same input with the same messages. The class is
thread-safe. It uses the model's files and the host's adapters, but no engine.
"""

import itertools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, SupportsIndex
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateSyntaxError

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError, RequestRefused
from slora.core.request import (
    NOT_SAMPLED,
    EngineRequest,
    Pooling,
    TokenDelta,
    WeightedAdapter,
    compose_adapters,
)
from slora.core.sampling_params import SamplingParams, refuse_surrogate
from slora.llm.lora_adapter import AdapterPath, LoraAdapter, TensorAdapter
from slora.models.model_spec import find_model, read_model_spec
from slora.text.answer import Answer
from slora.text.chat_template import compile_chat_template
from slora.text.generation_defaults import (
    GenerationDefaults,
    find_unsupported_fields,
    read_generation_defaults,
    read_model_defaults,
)
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.loader.source import DirectorySource
from slora_adapters.peft.adapter import Adapter, AdapterExtras, AdapterLimits
from slora_adapters.peft.extras import AddedToken, read_added_rows, read_added_tokens
from slora_adapters.peft.hub import download
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.peft.peft_directory import DirectoryState, assemble_adapter, read_adapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import ModelShape

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
# One conversation: a list of turns {"role": ..., "content": ...}.
Messages = Sequence[Mapping[str, Any]]
# One for all prompts, or one per prompt. None: the model's own defaults for parameters, and the base model for
# adapters. The entry of a prompt may be a list of adapters, which are combined.
Params = SamplingParams | Sequence[SamplingParams] | None
# The embedding of one prompt: float32 [dimensions].
Vector = npt.NDArray[np.float32]
AdapterLike = LoraAdapter | AdapterPath
PromptAdapters = AdapterLike | Sequence[AdapterLike] | None
Adapters = AdapterLike | Sequence[PromptAdapters] | None

# Identifies an adapter: its resolved directory, or the object itself.
_AdapterKey = Path | TensorAdapter

_TENANT = "local"
# The default max_tokens of a completion, as over HTTP. The default of a chat is the rest of the context.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _ServedModel:
    """The model that answers a prompt: the base or a sum of adapters.

    chat_templates: the chat templates of its adapters; None stands for the base model's template.
    tokenizers: the tokenizers of its adapters, the base's without added tokens; None without a tokenizer.
    """

    adapters: tuple[WeightedAdapter, ...]
    chat_templates: frozenset[str | None]
    defaults: GenerationDefaults
    tokenizers: frozenset[Tokenizer | None]

    @property
    def tokenizer(self) -> Tokenizer | None:
        if len(self.tokenizers) > 1:
            raise RequestRefused(
                "the tokenizers of the adapters have different added tokens; name adapters with the same added tokens",
                "adapters",
            )
        (tokenizer,) = self.tokenizers
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        if len(self.chat_templates) > 1:
            raise RequestRefused(
                "the adapters have different chat templates; render the conversation yourself and use `generate`",
                "adapters",
            )
        (template,) = self.chat_templates
        return template


def make_config(
    model: str | os.PathLike[str], dtype: str, device: str, settings: Mapping[str, Any]
) -> EngineConfig:
    """Makes the settings of an engine. A base model of the Hugging Face hub is downloaded first. Raises ConfigError."""
    config = EngineConfig(Path(model), dtype=dtype, device=device, **settings)
    return replace(config, model=find_model(config.model, config.model_impl, tell=logger.info))


class RequestBuilder:
    """Builds requests for one model. Raises ConfigError for a model that can't be served.

    notify, num_threads: passed to DirectorySource.
    max_model_len: the limit of the model, until the caller replaces it by the engine's limit.
    """

    def __init__(
        self, config: EngineConfig, *, notify: Callable[[], None] = lambda: None, num_threads: int = 0
    ) -> None:
        self.model = read_model_spec(config.model, config.model_impl)
        dtype = self.model.resolve_dtype(config.dtype)
        has_tokenizer = (config.model / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer.from_directory(config.model) if has_tokenizer else None
        limits = AdapterLimits(
            max_lora_rank=config.max_lora_rank,
            served_dtype=dtype,
            vocab_size=self.model.vocab_size,
            base_directory=config.model,
            tokenizer_digests=() if self._tokenizer is None else self._tokenizer.digests,
        )
        self.source = DirectorySource(
            self.model.shape(dtype),
            dtype,
            limits,
            notify=notify,
            num_threads=num_threads,
            num_ranks=config.tensor_parallel_size,
        )
        self._base = _ServedModel(
            (), frozenset([None]), read_model_defaults(config.model), frozenset([self._tokenizer])
        )
        self.max_model_len = self.model.max_positions
        self._served: dict[_AdapterKey, tuple[_ServedModel, DirectoryState | None]] = {}
        self._read_locks: dict[_AdapterKey | HubReference, Lock] = {}
        # A branch of the hub is resolved once; later requests use the same download.
        self._downloaded: dict[HubReference, Path] = {}
        self._num_discarded = 0
        # Kept as long as an adapter or an answer uses them.
        self._extended: WeakValueDictionary[tuple[AddedToken, ...], Tokenizer] = WeakValueDictionary()
        self._lock = Lock()
        self._numbers = itertools.count(1)

    def answers(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        adapters: Adapters,
    ) -> list[Answer]:
        """Returns one empty answer per prompt, with the request that fills it.

        Raises RequestRefused naming what can't be served, AdapterInvalid or AdapterNotFound.
        """
        served = self._find_all(_broadcast(adapters, len(prompts), "adapters"))
        rows = zip(prompts, served, strict=True)
        token_ids = [self._encode(prompt, index, one) for index, (prompt, one) in enumerate(rows)]
        return self._answers(token_ids, served, params, _COMPLETION_TOKENS)

    def chat_answers(
        self,
        conversations: Sequence[Messages],
        params: Params,
        adapters: Adapters,
    ) -> list[Answer]:
        """Like `answers`, for conversations.

        The adapter's chat template is used if it has one, otherwise the model's.
        """
        served = self._find_all(_broadcast(adapters, len(conversations), "adapters"))
        token_ids = []
        for index, (messages, one) in enumerate(zip(conversations, served, strict=True)):
            tokenizer = self._need_tokenizer(one, "a chat needs a tokenizer with a chat template", "messages")
            rendered = tokenizer.apply_chat_template(messages, one.chat_template)
            refuse_surrogate(
                rendered, f"the text that the chat template rendered for conversation {index}", "messages"
            )
            token_ids.append(tokenizer.encode_chat(rendered))
        return self._answers(token_ids, served, params, None)

    def embeddings(
        self, prompts: Sequence[Prompt], pooling: Pooling, adapters: Adapters
    ) -> list[EngineRequest]:
        """Returns one request per prompt. Raises as `answers` does."""
        served = self._find_all(_broadcast(adapters, len(prompts), "adapters"))
        rows = enumerate(zip(prompts, served, strict=True))
        return [
            replace(self._request(self._encode(prompt, index, one), one, NOT_SAMPLED), pooling=pooling)
            for index, (prompt, one) in rows
        ]

    def _answers(
        self,
        token_ids: list[list[int]],
        served: list[_ServedModel],
        params: Params,
        default_tokens: int | None,
    ) -> list[Answer]:
        wanted = _broadcast(params, len(token_ids), "params")
        rows = zip(token_ids, served, wanted, strict=True)
        return [
            Answer(
                self._request(ids, one, sampling or self._defaults(ids, one, default_tokens)),
                one.tokenizer,
                index,
            )
            for index, (ids, one, sampling) in enumerate(rows)
        ]

    def _request(self, token_ids: list[int], served: _ServedModel, sampling: SamplingParams) -> EngineRequest:
        if sampling.stop:
            self._need_tokenizer(served, "stop strings need a tokenizer; use stop_token_ids", "stop")
        if served.tokenizer is not None:
            served.tokenizer.check_form(sampling.structured_output)
        request_id = str(next(self._numbers))
        return EngineRequest(request_id, _TENANT, token_ids, served.adapters, sampling)

    def _defaults(
        self, token_ids: list[int], served: _ServedModel, default_tokens: int | None
    ) -> SamplingParams:
        """The sampling parameters of a request that sets none: defaults of the adapter, then of the model.

        A default of max_tokens that exceeds the context is ignored.
        """
        max_tokens = served.defaults.max_tokens or default_tokens
        if max_tokens is not None and max_tokens > self.max_model_len - len(token_ids):
            max_tokens = None
        sampling = served.defaults.params(max_tokens)
        return sampling if self._tokenizer is not None else replace(sampling, stop=())

    def _encode(self, prompt: Prompt, index: int, served: _ServedModel) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer(
                served, "a text prompt needs a tokenizer; pass token ids", "prompt"
            )
            refuse_surrogate(prompt, f"prompt {index}", "prompt")
            return tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            kind = type(prompt).__name__
            raise RequestRefused(
                f"prompt {index} is a {kind}; it must be a text or a list of token ids", "prompt"
            )
        return [_as_token_id(token, index, position) for position, token in enumerate(prompt)]

    @staticmethod
    def _need_tokenizer(served: _ServedModel, why: str, param: str) -> Tokenizer:
        if served.tokenizer is None:
            raise RequestRefused(f"this model directory has no tokenizer.json, and {why}", param)
        return served.tokenizer

    def discard(self, adapter: AdapterLike) -> AdapterVersion | None:
        """Discards an adapter and returns its version, or None if it was never used. The next use reads it again."""
        with self._lock:
            content = _as_lora_adapter(adapter).content
            if isinstance(content, HubReference):
                directory = self._downloaded.pop(content, None)
                if directory is None:
                    return None
                content = directory
            known = self._served.get(_adapter_key(content))
            if known is None:
                return None
            ((version, _),) = known[0].adapters
            self._served = {
                key: entry for key, entry in self._served.items() if entry[0].adapters != known[0].adapters
            }
            self._read_locks = {key: lock for key, lock in self._read_locks.items() if key in self._served}
            self._num_discarded += 1
            return version

    def _find_all(self, adapters: Sequence[PromptAdapters]) -> list[_ServedModel]:
        """Reads each adapter once, so that all prompts of a call that name it get the same version."""
        rows = [_as_adapters(adapter) for adapter in adapters]
        found = {adapter: self._find(adapter) for adapter in dict.fromkeys(itertools.chain(*rows))}
        return [self._compose([found[adapter] for adapter in row]) for row in rows]

    def _compose(self, parts: Sequence[_ServedModel]) -> _ServedModel:
        """Combines `parts`. The result has their defaults if they all agree, otherwise the base model's defaults."""
        if not parts:
            return self._base
        adapters = compose_adapters(adapter for part in parts for adapter in part.adapters)
        templates = frozenset().union(*(part.chat_templates for part in parts))
        is_unanimous = all(part.defaults == parts[0].defaults for part in parts)
        defaults = parts[0].defaults if is_unanimous else self._base.defaults
        tokenizers = frozenset().union(*(part.tokenizers for part in parts))
        return _ServedModel(adapters, templates, defaults, tokenizers)

    def _find(self, adapter: AdapterLike) -> _ServedModel:
        """Reads and validates an adapter on first use, and again when a file of its directory has changed."""
        named = _as_lora_adapter(adapter)
        content = self._download(named.content) if isinstance(named.content, HubReference) else named.content
        key = _adapter_key(content)
        with self._lock_of(key):  # Requests for one adapter read it once; others do not wait.
            state = DirectoryState.read(key) if isinstance(key, Path) else None
            served = self._find_known(key, state) or self._add(key, state)
        ((version, _),) = served.adapters
        return replace(served, adapters=(WeightedAdapter(version, named.weight),))

    def _find_tokenizer(self, extras: AdapterExtras) -> Tokenizer | None:
        """Returns the tokenizer of an adapter, which adapters with equal added tokens share. Raises AdapterInvalid."""
        tokens = read_added_tokens(extras.generation_config)
        if self._tokenizer is None or not tokens:
            return self._tokenizer
        with self._lock:
            known = self._extended.get(tokens)
        if known is not None:
            return known
        try:
            built = self._tokenizer.with_added_tokens(tokens)
        except ValueError as error:
            raise AdapterInvalid((Reason("added_tokens", str(error)),)) from None
        with self._lock:  # Another thread may have built an equal one.
            return self._extended.setdefault(tokens, built)

    def _find_known(self, key: _AdapterKey, state: DirectoryState | None) -> _ServedModel | None:
        """Returns the adapter if it was read before and has not changed, otherwise None.

        state: the state of its directory. Adapters given as tensors have none and never change.
        """
        served, known = self._served.get(key, (None, None))
        is_current = known is None or (state is not None and state.proves_unchanged(known))
        return served if is_current else None

    def _download(self, reference: HubReference) -> Path:
        with self._lock_of(reference):
            directory = self._downloaded.get(reference)
            if directory is None:
                directory = self._downloaded[reference] = download(reference).directory
        return directory

    def _lock_of(self, key: _AdapterKey | HubReference) -> Lock:
        with self._lock:
            return self._read_locks.setdefault(key, Lock())

    def _add(self, key: _AdapterKey, state: DirectoryState | None) -> _ServedModel:
        """Reads an adapter and keeps it. state: the state of its directory before this call."""
        number = self._num_discarded
        adapter = read_content(key, self.source.shape, self.source.limits)
        directory = key if isinstance(key, Path) else None
        # A discarded version may still be in the engine. With the number, the adapter that is added now gets a
        # different version, even if its weights are equal.
        version = self.source.hold(adapter, directory, f"{_TENANT}/{number}")
        own = read_generation_defaults(adapter.extras.generation_config)
        served = _ServedModel(
            (WeightedAdapter(version),),
            frozenset([adapter.extras.chat_template]),
            own.override(self._base.defaults),
            frozenset([self._find_tokenizer(adapter.extras)]),
        )
        with self._lock:
            # If the number has changed, the adapter may just have been discarded. Then it is not kept, and the next
            # request reads it again.
            if number == self._num_discarded:
                self._served[key] = served, state
        return served


def read_content(
    content: Path | HubReference | TensorAdapter, shape: ModelShape, limits: AdapterLimits
) -> Adapter:
    """Reads an adapter and validates it like an upload to the server.

    Raises AdapterNotFound, AdapterInvalid, and the errors of `hub.download`.
    """
    if isinstance(content, HubReference):
        content = download(content).directory
    if isinstance(content, Path):
        adapter = read_adapter(content, shape, limits)
    else:
        adapter = assemble_adapter(content.config, content.tensors, shape, limits)
    if reasons := _refuse_extras(adapter.extras, limits.vocab_size):
        raise AdapterInvalid(tuple(reasons))
    return adapter


def _refuse_extras(extras: AdapterExtras, vocab_size: int | None) -> list[Reason]:
    """The reasons why an adapter's chat template or generation config can't be used."""
    if vocab_size is not None:
        vocab_size += read_added_rows(extras.generation_config)
    reasons = find_unsupported_fields(extras.generation_config, vocab_size)
    if extras.chat_template is not None:
        try:
            compile_chat_template(extras.chat_template)
        except TemplateSyntaxError as error:
            message = f"the chat template cannot be read: line {error.lineno}: {error.message}"
            reasons.append(Reason("chat_template_malformed", message))
    return reasons


def read_embedding(delta: TokenDelta | None) -> Vector:
    assert delta is not None and delta.embedding is not None, "an embedding comes in one delta"
    return np.frombuffer(delta.embedding, np.float32).copy()


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is one prompt. Any other sequence is a list of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], SupportsIndex)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """A list of messages is one conversation. A list of such lists is several conversations."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _broadcast(value: Any, count: int, name: str) -> list[Any]:
    """Returns one entry per prompt. A single value is repeated. Raises ConfigError for a list of the wrong length."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"{name} has {len(value)} entries for {count} prompts; give one for all or one for each"
        )
    return list(value)


def _as_token_id(token: Any, index: int, position: int) -> int:
    """Accepts integers of numpy and torch too. The engine checks whether the vocabulary has the id."""
    try:
        return operator.index(token)
    except TypeError:
        raise RequestRefused(
            f"prompt {index} has {token!r:.80} at position {position}; a token id is an integer", "prompt"
        ) from None


def _as_adapters(entry: PromptAdapters) -> list[AdapterLike]:
    """The adapters of one prompt."""
    if entry is None:
        return []
    return [entry] if isinstance(entry, LoraAdapter | str | os.PathLike) else list(entry)


def _as_lora_adapter(adapter: AdapterLike) -> LoraAdapter:
    return adapter if isinstance(adapter, LoraAdapter) else LoraAdapter(adapter)


def _adapter_key(content: Path | TensorAdapter) -> _AdapterKey:
    return content.resolve() if isinstance(content, Path) else content
