"""The matcher of `allowed_token_ids` and `bad_words`. Given the tokens generated so far, it tells which may come next.

As in vLLM, a sequence of `bad_words` is prevented by forbidding its last token after all of its other tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from slora.core.sampling_params import SamplingParams
from slora_kernels.layout import Int32Array

__all__ = ["TokenFilter"]


class TokenFilter:
    """A `Matcher` that always allows at least one token: `check_sampling` refuses requests without allowed tokens.

    allowed: None allows all tokens. Tokens of `banned` are never allowed.
    endings: the forbidden sequences of two or more tokens, by their second-last token.
    """

    error = None

    def __init__(
        self,
        allowed: Sequence[int] | None,
        banned: Sequence[int],
        endings: Mapping[int, Sequence[tuple[int, ...]]],
    ) -> None:
        self._allowed = allowed
        self._banned = banned
        self._endings = endings
        self._longest = max((len(one) for group in endings.values() for one in group), default=1)
        # The last tokens of the answer, at most `_longest` - 1.
        self._tail: tuple[int, ...] = ()
        # The mask before `endings` is applied.
        self._fixed: Int32Array | None = None

    @staticmethod
    def of(sampling: SamplingParams) -> "TokenFilter | None":
        """The filter of a request; None if the request allows all tokens."""
        if sampling.allowed_token_ids is None and not sampling.bad_words:
            return None
        endings = defaultdict(list)
        for tokens in sampling.bad_words:
            if len(tokens) > 1:
                endings[tokens[-2]].append(tokens)
        banned = [tokens[0] for tokens in sampling.bad_words if len(tokens) == 1]
        return TokenFilter(sampling.allowed_token_ids, banned, endings)

    def copy(self) -> "TokenFilter":
        made = TokenFilter(self._allowed, self._banned, self._endings)
        made._tail, made._fixed = self._tail, self._fixed
        return made

    def accept(self, token_id: int) -> None:
        if self._longest > 1:
            self._tail = (*self._tail, token_id)[1 - self._longest :]

    def write_mask(self, words: Int32Array) -> None:
        if self._fixed is None:
            self._fixed = self._make_fixed(len(words))
        words[:] = self._fixed
        for tokens in self._endings.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[1 - len(tokens) :] == tokens[:-1]:
                _forbid(words, tokens[-1])

    def _make_fixed(self, num_words: int) -> Int32Array:
        if self._allowed is None:
            words = np.full(num_words, -1, np.int32)
        else:
            words = np.zeros(num_words, np.int32)
            for token in self._allowed:
                words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        for token in self._banned:
            _forbid(words, token)
        return words


def _forbid(words: Int32Array, token: int) -> None:
    words.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
