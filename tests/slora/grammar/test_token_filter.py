"""The masks of allowed tokens and bad words, against a plain twin in torch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slora.core.sampling_params import SamplingParams
from slora.grammar.matcher import TokenFilter
from slora_kernels.torch.token_sampling import mask_logits

VOCAB = 70
# Few different tokens, so that the ends of random answers are often the beginning of a bad word.
TOKENS = st.sampled_from([0, 1, 31, 32, 69])


def filter_plainly(
    logits: torch.Tensor, allowed: tuple[int, ...] | None, bad_words: list[tuple[int, ...]], answer: list[int]
) -> torch.Tensor:
    """vLLM's definition: a word's last token is forbidden if the tokens before it are the end of the answer."""
    filtered = logits.clone()
    if allowed is not None:
        others = [token for token in range(VOCAB) if token not in allowed]
        filtered[others] = -torch.inf
    for tokens in bad_words:
        *before, last = tokens
        if not before or answer[-len(before) :] == before:
            filtered[last] = -torch.inf
    return filtered


@given(
    st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1),
    st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6),
    st.lists(TOKENS, max_size=8),
    st.integers(0, 8),
)
def test_a_filter_allows_what_its_twin_allows_after_every_token(
    allowed: list[int] | None, bad_words: list[tuple[int, ...]], answer: list[int], num_before_copy: int
) -> None:
    """The copy stands for a fork. The original goes on with another token, which must not reach the copy."""
    ids = None if allowed is None else tuple(allowed)
    made = TokenFilter.of(SamplingParams(allowed_token_ids=ids, bad_words=tuple(bad_words)))
    if made is None:
        assert ids is None and not bad_words
        return
    words = np.empty(-(-VOCAB // 32), np.int32)
    for position in range(len(answer) + 1):
        if position == num_before_copy:
            original, made = made, made.copy()
            original.accept(7)
        made.write_mask(words)
        logits = torch.arange(VOCAB).float()
        expected = filter_plainly(logits, ids, bad_words, answer[:position])
        mask_logits(logits[None], torch.tensor([0]), torch.from_numpy(words.copy())[None])
        assert torch.equal(logits, expected)
        if position < len(answer):
            made.accept(answer[position])
