"""How many pages the KV of one sequence takes at once. Plain numbers; knows no pool and no other sequence.

With a window in every layer, blocks wholly behind the window of the next token to be computed are given back while the
sequence runs. What it holds then depends on how many tokens are computed at a time, not on its length.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFootprint:
    """window: the most tokens that a token sees in any layer, itself included; None where a layer sees all of them."""

    block_tokens: int
    window: int | None = None

    def pages(self, num_tokens: int, chunk_tokens: int = 1) -> int:
        """The most pages that a sequence of `num_tokens` holds at once when `chunk_tokens` are computed at a time.

        Worked example, blocks of 16 and a window of 32, tokens one by one: 32 tokens that lie anywhere touch 3 blocks.
        """
        whole = -(-num_tokens // self.block_tokens)
        if self.window is None:
            return whole
        in_sight = self.window - 1 + chunk_tokens
        return min(whole, (in_sight + self.block_tokens - 2) // self.block_tokens + 1)

    def chunk_tokens(self, num_tokens: int, num_pages: int) -> int:
        """The most tokens of a sequence of `num_tokens` that may be computed at a time if it has `num_pages` pages
        at most; below 1 if that is too few for it at all."""
        if self.pages(num_tokens, num_tokens) <= num_pages:
            return num_tokens
        if self.window is None:
            return 0
        return (num_pages - 1) * self.block_tokens + 2 - self.window

    def first_token_seen(self, position: int) -> int:
        """The first token that the one at `position` looks back on, in the layer that looks back furthest."""
        return 0 if self.window is None else max(0, position - self.window + 1)
