"""The maximum number of pages that the KV of one sequence occupies at any time.

If every layer has a sliding window, blocks completely behind the window of the next token are freed while the sequence
runs. Then the footprint depends on the number of tokens computed at a time, not on the sequence's length.

This module computes with plain numbers and does not depend on a pool or on sequences.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFootprint:
    """The KV footprint of any sequence of one model.

    window: the maximum number of tokens, itself included, that a token attends to in any layer. None if a layer
        attends to all tokens.
    """

    block_tokens: int
    window: int | None = None

    def pages(self, num_tokens: int, chunk_tokens: int = 1) -> int:
        """The maximum number of pages that a sequence of `num_tokens` holds when it computes `chunk_tokens` at a time.

        Worked example: blocks of 16 tokens, a window of 32, one token at a time. 32 consecutive tokens touch up to 3
        blocks.
        """
        whole = -(-num_tokens // self.block_tokens)
        if self.window is None:
            return whole
        in_sight = self.window - 1 + chunk_tokens
        return min(whole, (in_sight + self.block_tokens - 2) // self.block_tokens + 1)

    def chunk_tokens(self, num_tokens: int, num_pages: int) -> int:
        """The maximum chunk size with which a sequence of `num_tokens` holds at most `num_pages` pages.

        Less than 1 if no chunk size is small enough.
        """
        if self.pages(num_tokens, num_tokens) <= num_pages:
            return num_tokens
        if self.window is None:
            return 0
        return (num_pages - 1) * self.block_tokens + 2 - self.window

    def first_token_seen(self, position: int) -> int:
        """The first token that the token at `position` attends to, in the layer with the largest window."""
        return 0 if self.window is None else max(0, position - self.window + 1)
