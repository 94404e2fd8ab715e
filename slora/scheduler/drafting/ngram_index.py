"""An index of where each n-gram of a sequence occurred last, to find the tokens that may come next.

An n-gram is a run of n consecutive tokens. The index keeps the hash of an n-gram, not its tokens. If two n-grams have
the same hash, the result is a wrong draft, which costs time but never changes an answer.
"""

# The longest n-gram that occurred earlier is used. Longer n-grams predict better, shorter ones are found more often.
NGRAM_SIZES = (4, 2)


class NgramIndex:
    """For each n-gram of a sequence, the position after its last occurrence.

    Takes about 200 bytes per token. The n-gram at the end of the sequence is indexed only when another token follows.
    """

    __slots__ = ("_next", "_num_indexed")

    def __init__(self) -> None:
        self._next: tuple[dict[int, int], ...] = tuple({} for _ in NGRAM_SIZES)
        self._num_indexed = 0

    def extend(self, token_ids: list[int], limit: int) -> int:
        """Indexes the n-grams that end in the next `limit` tokens, or fewer. Returns how many tokens it indexed."""
        start = self._num_indexed
        end = min(len(token_ids) - 1, start + limit)
        if end <= start:
            return 0
        for size, following in zip(NGRAM_SIZES, self._next, strict=True):
            for after in range(max(start + 1, size), end + 1):
                following[hash(tuple(token_ids[after - size : after]))] = after
        self._num_indexed = end
        return end - start

    def find(self, token_ids: list[int]) -> tuple[int, int] | None:
        """Finds the longest n-gram at the end of the sequence that occurred earlier.

        Returns the index of the n-gram's size in `NGRAM_SIZES`, and the position after its last earlier occurrence.
        Returns None if no n-gram occurred earlier.
        """
        for rank, (size, following) in enumerate(zip(NGRAM_SIZES, self._next, strict=True)):
            position = following.get(hash(tuple(token_ids[-size:])))
            if position is not None:
                return rank, position
        return None


def copy_from(token_ids: list[int], position: int, count: int) -> list[int]:
    """Copies `count` tokens from `position` on. A copy that reaches the end continues with what it has copied.

    Worked example: of the tokens 5, 6, 7, four tokens from position 1 on are 6, 7, 6, 7.
    """
    known = token_ids[position : position + count]
    if len(known) < count:
        known = (known * -(-count // len(known)))[:count]
    return known
