import pytest

from slora.memory.swap_space import SwapSpace


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1], [1]])
def test_check_finds_a_page_that_is_lost_or_has_two_owners(held: list[int]) -> None:
    space = SwapSpace(4)
    assert space.allocate(1) == [0]
    space.check_invariants([0])
    with pytest.raises(AssertionError, match=r"3 host pages are free and \d are held, of 4"):
        space.check_invariants(held)


def test_taking_more_than_is_free_fails() -> None:
    with pytest.raises(AssertionError, match="3 host pages are requested, but only 2 are free"):
        SwapSpace(2).allocate(3)


def test_a_page_cannot_be_released_twice() -> None:
    space = SwapSpace(2)
    pages = space.allocate(1)
    space.release(pages)
    with pytest.raises(AssertionError, match="host page 0 is already free"):
        space.release(pages)
