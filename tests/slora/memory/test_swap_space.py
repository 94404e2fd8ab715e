import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.memory.swap_space import SwapSpace


class SwapSpaceMachine(RuleBasedStateMachine):
    """Sequences are swapped out and in again."""

    @initialize(num_pages=st.integers(0, 12))
    def start(self, num_pages: int) -> None:
        self.space = SwapSpace(num_pages)
        self.saved: list[list[int]] = []

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.space.num_free))
        pages = self.space.allocate(count)
        assert len(pages) == count
        self.saved.append(pages)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.space.release(self.saved.pop(data.draw(st.integers(0, len(self.saved) - 1))))

    @invariant()
    def every_page_is_free_or_somebodys(self) -> None:
        held = [page for pages in self.saved for page in pages]
        self.space.check_invariants(held)
        assert self.space.num_free == self.space.num_pages - len(held)


TestSwapSpace = SwapSpaceMachine.TestCase


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
