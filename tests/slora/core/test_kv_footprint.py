from hypothesis import given
from hypothesis import strategies as st

from slora.core.engine_config import KVFootprint


def blocks_in_sight(footprint: KVFootprint, start: int, num_tokens: int) -> int:
    """A brute-force count of the blocks that tokens [start, start + num_tokens) write to or attend to."""
    first = footprint.first_token_seen(start)
    return len({token // footprint.block_tokens for token in range(first, start + num_tokens)})


sizes = st.integers(1, 40)


@given(st.sampled_from([1, 2, 4, 16]), st.none() | sizes, st.integers(1, 90), sizes)
def test_the_footprint_is_the_most_blocks_that_any_chunk_has_in_sight(
    block_tokens: int, window: int | None, num_tokens: int, chunk_tokens: int
) -> None:
    footprint = KVFootprint(block_tokens, window)
    chunks = [(at, min(chunk_tokens, num_tokens - at)) for at in range(num_tokens)]
    most = max(blocks_in_sight(footprint, *chunk) for chunk in chunks)
    assert most <= footprint.pages(num_tokens, chunk_tokens)
    enough = num_tokens >= (window or 0) + chunk_tokens + 2 * block_tokens
    if enough or window is None:
        assert most == footprint.pages(num_tokens, chunk_tokens)


@given(st.sampled_from([1, 2, 4, 16]), st.none() | sizes, st.integers(1, 90), sizes)
def test_a_chunk_is_as_long_as_the_pages_allow_and_no_longer(
    block_tokens: int, window: int | None, num_tokens: int, num_pages: int
) -> None:
    footprint = KVFootprint(block_tokens, window)
    most = footprint.chunk_tokens(num_tokens, num_pages)
    if most < 1:
        assert footprint.pages(num_tokens, 1) > num_pages
        return
    assert footprint.pages(num_tokens, min(most, num_tokens)) <= num_pages
    if most < num_tokens:
        assert footprint.pages(num_tokens, most + 1) > num_pages
