"""Runs a new adapter once before any request can use it. Its output must be finite and differ from the base model's.

The canary sends the engine two requests with the same short prompt: one with the adapter, and one without it. It
compares the log-probabilities of the prompt's tokens and of the most probable tokens at each position. Both requests
belong to an internal tenant that is never charged. They are scheduled like other requests, so a busy server delays an
upload. An upload costs the engine about twenty tokens of compute.

The prompt is made of token ids rather than of text, because a vocabulary need not contain any given text.

On GPUs the rounding depends on the batch, so even two runs of the base model may differ in the last digits. An adapter
without a real effect may therefore pass on a GPU. The inspection has already refused adapters whose LoRA factors are
zero.
"""

import asyncio
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing

from slora.client.client import EngineClient
from slora.core.errors import RequestFailed, RequestRefused
from slora.core.request import EngineRequest, TokenLogprobs, single_adapter
from slora.core.sampling_params import MAX_LOGPROBS, SamplingParams
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import InspectionFailed

# A tenant's name cannot contain a colon.
CANARY_TENANT = "slora:canary"
# The prompt is shorter than a default KV block of 16 tokens, so that the prefix cache keeps nothing of it.
_PROMPT_TOKENS = 10
_TIMEOUT_S = 120.0


class Canary:
    """Tries out adapters on the engine of `client`. timeout_s: time limit for the two requests together."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, timeout_s: float = _TIMEOUT_S) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s

    async def try_out(self, version: AdapterVersion, embedded_tokens: Sequence[int]) -> float:
        """Returns the largest absolute change of a log-probability that the adapter causes.

        embedded_tokens: some tokens whose embedding the adapter changes.

        Raises AdapterInvalid if a log-probability is not finite, or if all log-probabilities equal those of the base
        model. Raises InspectionFailed if no answer arrives in time. Raises the engine's own errors if the engine is
        unavailable or cannot load the adapter.
        """
        prompt = [*choose_prompt(self._tokenizer, self._client.info.vocab_size), *embedded_tokens]
        try:
            async with asyncio.timeout(self._timeout_s):
                base = await self._score(None, prompt)
                own = await self._score_adapter(version, prompt)
        except TimeoutError:
            raise InspectionFailed(
                f"The trial run of the adapter did not finish within {self._timeout_s:g} s, because "
                "the server is too busy. Try again."
            ) from None
        if own == base:
            raise _refused(
                "no_effect",
                f"the adapter has no effect: for a prompt of {len(prompt)} tokens, all {len(own)} "
                "log-probabilities equal those of the base model; save the adapter after training",
            )
        # The two runs may sample different last tokens, whose log-probabilities cannot be compared.
        return max(abs(own[key] - base[key]) for key in own.keys() & base.keys())

    async def _score_adapter(self, version: AdapterVersion, prompt: list[int]) -> "_Scores":
        try:
            scores = await self._score(version, prompt)
        except RequestRefused as error:
            raise _refused("not_servable", f"the adapter cannot be served here: {error}") from None
        except RequestFailed as error:
            raise _refused(
                "not_finite", f"the adapter makes the model's outputs NaN or infinite: {error}"
            ) from None
        if not all(map(math.isfinite, scores.values())):
            raise _refused("not_finite", "the adapter causes log-probabilities that are NaN or infinite")
        return scores

    async def _score(self, version: AdapterVersion | None, prompt: list[int]) -> "_Scores":
        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
        )
        request = EngineRequest(uuid.uuid4().hex, CANARY_TENANT, prompt, single_adapter(version), sampling)
        entries: list[TokenLogprobs | None] = []
        async with aclosing(self._client.generate(request)) as deltas:
            async for arrived in deltas:
                for delta in arrived:
                    entries += [*delta.prompt_logprobs, *(delta.logprobs or ())]
        return dict(_list_scores(entries))


def choose_prompt(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns at most ten token ids, spread evenly over the model's vocabulary. They are the same in each call.

    Added tokens are avoided where possible, because many have embeddings that were never trained.
    """
    limit, added = min(vocab_size, tokenizer.vocab_size), tokenizer.added_token_ids
    starts = (limit * position // _PROMPT_TOKENS for position in range(_PROMPT_TOKENS))
    plain = (
        next((token_id for token_id in range(start, limit) if token_id not in added), 0) for start in starts
    )
    return list(dict.fromkeys(plain))


# (position, token id) -> log-probability. The token id -1 stands for the token of the prompt or answer at that
# position.
_Scores = dict[tuple[int, int], float]


def _list_scores(entries: Sequence[TokenLogprobs | None]) -> Iterator[tuple[tuple[int, int], float]]:
    for position, entry in enumerate(entries):
        if entry is not None:
            yield (position, -1), entry.logprob
            yield from (((position, token_id), logprob) for token_id, logprob in entry.top)


def _refused(code: str, message: str) -> AdapterInvalid:
    return AdapterInvalid((Reason(code, message),))
