"""Runs a new adapter once, before anybody can call it: what it answers must be numbers, and not what the base answers.

An ordinary request to the engine with the adapter, and one without, over a short fixed prompt; what is compared are the
log-probabilities of its tokens and of the likeliest ones in each place. The requests are a tenant's of our own, whom
nobody is charged for and who has his turn like any other, so that a busy server delays an upload but no upload more
than some twenty tokens of somebody else's time.

Where batches are rounded differently (on GPUs), two runs of the base model differ in the last places; there an adapter
that changes less passes. One whose factors are zero was refused before, by its numbers.
"""

import asyncio
import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing

from slora.engine.client import EngineClient
from slora.errors import DeadlineMissed, RequestFailed, RequestRefused
from slora.request import EngineRequest, TokenLogprobs
from slora.sampling_params import MAX_LOGPROBS, SamplingParams
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid, Reason
from slora_adapters.version import AdapterVersion
from slora_api.errors import InspectionFailed

__all__ = ["CANARY_TENANT", "Canary"]

# No tenant's name has a colon.
CANARY_TENANT = "slora:canary"
_TEXT = "The quick brown fox jumps over the lazy dog, and then? 1 + 2 = 3."
# Together less than the 16 of a block of the default size, so that nothing of it stays in the prefix cache.
_TEXT_TOKENS = 10
_TIMEOUT_S = 120.0


class Canary:
    """Tries out adapters on the engine of `client`."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, timeout_s: float = _TIMEOUT_S) -> None:
        self._client = client
        self._prompt = tokenizer.encode(_TEXT)[:_TEXT_TOKENS]
        self._timeout_s = timeout_s

    async def try_out(self, version: AdapterVersion, embedded_tokens: Sequence[int]) -> float:
        """By how much it changes a log-probability, at most. embedded_tokens: some whose embedding it changes.

        Raises AdapterInvalid if its answer is no number or is the base model's, InspectionFailed if none comes, and
        what the engine raises when it is not there or can't load it.
        """
        prompt = [*self._prompt, *embedded_tokens]
        try:
            async with asyncio.timeout(self._timeout_s):
                base = await self._score(None, prompt)
                own = await self._score_adapter(version, prompt)
        except TimeoutError:
            raise InspectionFailed(
                f"The adapter's first answer did not come within {self._timeout_s:g} s; the server is too busy. Try "
                "again."
            ) from None
        if own == base:
            raise _refused(
                "no_effect",
                f"the adapter has no effect: on a prompt of {len(prompt)} tokens none of {len(own)} log-probabilities "
                "differs from the base model's; save it after training",
            )
        # The last place's own token may be another, whose log-probability says nothing about the other's.
        return max(abs(own[key] - base[key]) for key in own.keys() & base.keys())

    async def _score_adapter(self, version: AdapterVersion, prompt: list[int]) -> "_Scores":
        try:
            scores = await self._score(version, prompt)
        except RequestRefused as error:
            raise _refused("not_servable", f"the adapter can't be served here: {error}") from None
        except DeadlineMissed:
            raise
        except RequestFailed as error:
            raise _refused("not_finite", f"the adapter breaks the model's arithmetic: {error}") from None
        if not all(map(math.isfinite, scores.values())):
            raise _refused("not_finite", "the adapter makes log-probabilities that are NaN or infinite")
        return scores

    async def _score(self, version: AdapterVersion | None, prompt: list[int]) -> "_Scores":
        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
        )
        request = EngineRequest(uuid.uuid4().hex, CANARY_TENANT, prompt, version, sampling)
        entries: list[TokenLogprobs | None] = []
        async with aclosing(self._client.generate(request)) as deltas:
            async for delta in deltas:
                entries += [*delta.prompt_logprobs, *(delta.logprobs or ())]
        return dict(_list_scores(entries))


# (place, token) -> its log-probability; the place's own token has the number -1.
_Scores = dict[tuple[int, int], float]


def _list_scores(entries: Sequence[TokenLogprobs | None]) -> Iterator[tuple[tuple[int, int], float]]:
    for place, entry in enumerate(entries):
        if entry is not None:
            yield (place, -1), entry.logprob
            yield from (((place, token), logprob) for token, logprob in entry.top)


def _refused(code: str, message: str) -> AdapterInvalid:
    return AdapterInvalid((Reason(code, message),))
