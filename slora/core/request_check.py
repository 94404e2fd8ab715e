"""Decides whether an engine can serve a request, with pure functions without tensors, sockets or state.

The engine calls `check_request`. An API process calls the same checks one by one, each as early as possible:
`check_terms` and `check_sampling` before it tokenizes the prompt, and the checks of lengths afterwards.
`SamplingParams` checks the ranges of its own fields. Only the scheduler knows whether a request fits into the pool
together with its adapter, because it learns the adapter's size in pages when the adapter is fetched.

Every check raises RequestRefused, which names the field.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from slora.core.engine_state import EngineInfo
from slora.core.errors import ContextTooLong, RequestRefused
from slora.core.request import (
    MAX_ADAPTER_WEIGHT,
    MAX_DEADLINE_S,
    MAX_PRIORITY,
    NOT_SAMPLED,
    EmittedTokens,
    EngineRequest,
    Pooling,
    WeightedAdapter,
)
from slora.core.sampling_params import SamplingParams
from slora_kernels.layout import MAX_ADDED_ROWS


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """A request for one adapter may have ids of added tokens. `count_added_tokens` tells how many the adapter needs."""
    num_added = count_added_tokens(request, info)
    if num_added <= MAX_ADDED_ROWS and [weight for _, weight in request.adapters] == [1]:
        info = info.with_added_tokens(num_added)
    check_adapters(request.adapters, info)
    check_terms(request.priority, request.deadline_s, info)
    check_sampling(request.sampling, info)
    check_token_ids(request.prompt_token_ids, info.vocab_size)
    num_tokens, sampling = len(request.prompt_token_ids), request.sampling
    if request.emitted is not None:
        _check_emitted(request, request.emitted, info)
    if request.pooling is not None:
        check_pooling(request.pooling, info)
        check_embedded_tokens(num_tokens, info.max_model_len)
        if sampling != NOT_SAMPLED:
            raise RequestRefused("an embedding samples no token; omit the sampling parameters", "pooling")
        return
    room = find_answer_room(num_tokens, info.max_model_len)
    if sampling.max_tokens is not None:
        check_max_tokens(sampling.max_tokens, num_tokens, info.max_model_len)
    elif sampling.min_tokens > room:
        raise RequestRefused(
            f"min_tokens is {sampling.min_tokens}, but the answer can have at most {room} tokens "
            "(max_model_len)",
            "min_tokens",
        )


def count_added_tokens(request: EngineRequest, info: EngineInfo) -> int:
    """Returns how many tokens behind those of the base model the ids of a request stand for."""
    sampling = request.sampling
    emitted = () if request.emitted is None else (tokens or () for tokens in request.emitted.choices)
    ids = (
        request.prompt_token_ids,
        sampling.logit_bias,
        sampling.logprob_token_ids,
        sampling.allowed_token_ids or (),
        *sampling.bad_words,
        *emitted,
    )
    return max(0, 1 + max(max(tokens, default=0) for tokens in ids) - info.vocab_size)


def _check_emitted(request: EngineRequest, emitted: EmittedTokens, info: EngineInfo) -> None:
    if request.pooling is not None or request.sampling.use_beam_search:
        raise RequestRefused(
            "an embedding and a beam search cannot be resumed; send the request again", "emitted"
        )
    width = request.sampling.width
    if len(emitted.choices) != width or not request.open_choices:
        raise RequestRefused(
            f"emitted has {len(emitted.choices)} choices, {len(request.open_choices)} of them unfinished; a resumed "
            f"request needs all of its {width} choices and an unfinished one",
            "emitted",
        )
    _check_vocabulary("emitted", chain.from_iterable(tokens or () for tokens in emitted.choices), info)


def check_adapters(adapters: Sequence[WeightedAdapter], info: EngineInfo) -> None:
    """Checks the number of adapters and their weights. adapters: as `compose_adapters` returns them."""
    if len(adapters) > info.max_composed_adapters:
        raise RequestRefused(
            f"adapters has {len(adapters)} adapters; this server adds up at most {info.max_composed_adapters} in one "
            "request (max_composed_adapters)",
            "adapters",
        )
    for version, weight in adapters:
        if not abs(weight) <= MAX_ADAPTER_WEIGHT:  # The comparison is written so that it also refuses NaN.
            raise RequestRefused(
                f"adapters has the weight {weight} for adapter {version.digest[:12]}, counting all of its entries; it "
                f"must be a number from -{MAX_ADAPTER_WEIGHT:g} to {MAX_ADAPTER_WEIGHT:g}",
                "adapters",
            )


def check_terms(priority: int, deadline_s: float | None, info: EngineInfo) -> None:
    """Checks the priority and the deadline. Clients set the deadline in milliseconds, in the field `deadline_ms`."""
    # bool is refused, although Python's bool is an int.
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or abs(priority) > MAX_PRIORITY:
        raise RequestRefused(
            f"priority is {priority!r}; it must be a whole number from -{MAX_PRIORITY} to "
            f"{MAX_PRIORITY}, and lower is served first",
            "priority",
        )
    if priority and info.scheduling == "fcfs":
        raise RequestRefused(
            f"priority is {priority}, but this engine serves requests in order of arrival "
            "(scheduling fcfs); omit priority",
            "priority",
        )
    if deadline_s is not None and not 0 < deadline_s <= MAX_DEADLINE_S:
        raise RequestRefused(
            f"deadline_ms is {1000 * deadline_s:g}; it must be above 0 and at most {1000 * MAX_DEADLINE_S:.0f}",
            "deadline_ms",
        )


def check_sampling(sampling: SamplingParams, info: EngineInfo) -> None:
    """Checks the number of choices and every token id of the parameters."""
    width, width_param = sampling.width, sampling.width_param
    if width > info.max_num_seqs:
        raise RequestRefused(
            f"{width_param} is {width}; this server computes at most {info.max_num_seqs} answers at once "
            "(max_num_seqs)",
            width_param,
        )
    outside = [token for token in sampling.logit_bias if token >= info.vocab_size]
    if outside:
        raise RequestRefused(
            f"logit_bias has token id {outside[0]}; this model has {info.vocab_size} ids, 0 to {info.vocab_size - 1}",
            "logit_bias",
        )
    _check_vocabulary("logprob_token_ids", sampling.logprob_token_ids, info)
    stop_ids = find_stop_token_ids(sampling, info)
    _check_filter(sampling, stop_ids, info)
    num_left = info.vocab_size - sum(token < info.vocab_size for token in stop_ids)
    if sampling.min_tokens and not num_left:
        raise RequestRefused(
            f"min_tokens is {sampling.min_tokens}, but all {info.vocab_size} tokens are stop tokens",
            "min_tokens",
        )
    # With fewer tokens than beams, a search cannot extend every beam.
    if sampling.use_beam_search and width > num_left:
        raise RequestRefused(
            f"{width_param} is {width}, but only {num_left} of the {info.vocab_size} tokens are not "
            "stop tokens; ask for fewer beams",
            width_param,
        )


def _check_vocabulary(name: str, token_ids: Iterable[int], info: EngineInfo) -> None:
    outside = next((token for token in token_ids if token >= info.vocab_size), None)
    if outside is not None:
        raise RequestRefused(
            f"{name} has token id {outside}, which is out of vocabulary; this model's ids are 0 to "
            f"{info.vocab_size - 1}",
            name,
        )


def _check_filter(sampling: SamplingParams, stop_ids: AbstractSet[int], info: EngineInfo) -> None:
    """Checks the ids of `allowed_token_ids` and `bad_words`, and that at least one token stays allowed at every
    position of the answer.
    """
    allowed, banned = sampling.allowed_token_ids, sampling.bad_words
    if allowed is None and not banned:
        return
    for name, ids in (("allowed_token_ids", allowed or ()), ("bad_words", chain.from_iterable(banned))):
        _check_vocabulary(name, ids, info)
    # Each sequence forbids at most its last token.
    forbidden = {tokens[-1] for tokens in banned}
    if sampling.min_tokens or sampling.use_beam_search:
        forbidden |= stop_ids
    if allowed is None:
        num_left = info.vocab_size - sum(token < info.vocab_size for token in forbidden)
    else:
        num_left = len(set(allowed) - forbidden)
    num_needed = sampling.width if sampling.use_beam_search else 1
    if num_left < num_needed:
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise RequestRefused(
            f"{name} leaves {num_left} tokens that neither end a bad word nor stop the answer; it needs at least "
            f"{num_needed}, so allow more tokens",
            name,
        )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Checks that a prompt is not empty and all its ids are in the vocabulary. param: the field with the prompt."""
    if not token_ids:
        raise RequestRefused(f"the {param} is empty; it needs at least one token", param)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestRefused(
            f"{param} has token id {wrong}, which is out of vocabulary; this model's ids are 0 to {vocab_size - 1}",
            param,
        )


def find_answer_room(num_prompt_tokens: int, max_model_len: int, param: str = "prompt") -> int:
    """Returns how many tokens of the context are left for the answer, and raises ContextTooLong if there are none.

    param: the field that holds the prompt.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong.of(
            max_model_len,
            f"{param} has {num_prompt_tokens} tokens, which leave no room for an answer; shorten the prompt",
            param,
        )
    return room


def check_pooling(pooling: Pooling, info: EngineInfo) -> None:
    if not info.can_embed:
        raise RequestRefused(
            f"the model {info.model_name!r} computes no embeddings: its class in transformers has no last_hidden_state",
            "model",
        )
    if pooling.dimensions is not None and pooling.dimensions > info.shape.hidden_size:
        raise RequestRefused(
            f"dimensions is {pooling.dimensions}; this model's embeddings have {info.shape.hidden_size} (hidden_size), "
            "so ask for at most that",
            "dimensions",
        )


def check_embedded_tokens(num_tokens: int, max_model_len: int, param: str = "input", what: str = "") -> None:
    """Checks that a prompt to embed fits into the context. It may fill the whole context.

    param: the field that holds the prompt. what: the prompt, for the message; by default, the field.
    """
    if num_tokens > max_model_len:
        raise ContextTooLong.of(max_model_len, f"{what or param} has {num_tokens} tokens; shorten it", param)


def check_max_tokens(
    max_tokens: int, num_prompt_tokens: int, max_model_len: int, param: str = "max_tokens"
) -> None:
    """Checks that prompt and answer fit into the context. param: the field that sets max_tokens."""
    room = max_model_len - num_prompt_tokens
    if max_tokens > room:
        raise ContextTooLong.of(
            max_model_len,
            f"the prompt has {num_prompt_tokens} tokens and {param} is {max_tokens}, "
            f"{num_prompt_tokens + max_tokens} in total; ask for at most {room}",
            param,
        )


def find_stop_token_ids(sampling: SamplingParams, info: EngineInfo) -> frozenset[int]:
    """Returns the token ids that end an answer: the request's and, unless the request ignores them, the model's."""
    stop_ids = frozenset(sampling.stop_token_ids)
    return stop_ids if sampling.ignore_eos else stop_ids | frozenset(info.eos_token_ids)
