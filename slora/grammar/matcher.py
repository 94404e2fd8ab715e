"""What structured output shares with the scheduler: the matcher of an answer, and the spelling of a vocabulary.

`GrammarLibrary` makes the matchers of grammars. `TokenFilter` is the matcher of `allowed_token_ids` and `bad_words`. As
in vLLM, a sequence of `bad_words` is prevented by forbidding its last token after all of its other tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slora.core.sampling_params import SamplingParams
from slora_kernels.layout import Int32Array


class Matcher(Protocol):
    """The state of one answer within its grammar: which tokens may come next."""

    @property
    def error(self) -> str | None:
        """The reason why no token can come next. None if some token can, or before the first call of `write_mask`."""

    def copy(self) -> "Matcher":
        """Returns an independent matcher in the same state."""

    def accept(self, token_id: int) -> None:
        """Appends a token to the answer. The last mask must have allowed it, and it must not be a stop token."""

    def write_mask(self, words: Int32Array) -> None:
        """Writes the mask of the next token into words int32 [ceil(V / 32)], with the same V in each call.

        Bit t % 32 of word t // 32 is 1 if token t is allowed. Stop tokens are allowed where the answer may end. If no
        token is allowed, all bits are 0 and `error` has the reason. Repeating the call has no effect.
        """


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """The bytes of each token within a text.

    pieces: one entry for each id of the model's vocabulary. Empty for ids that no answer may contain: special tokens
        and ids without a token.
    not_first: ids that spell something else at the start of a text, where the decoder strips a space.
    """

    pieces: Sequence[bytes]
    not_first: Sequence[int] = ()


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
        self._longest = max((len(tokens) for group in endings.values() for tokens in group), default=1)
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
