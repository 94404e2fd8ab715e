"""Matches module names against regular expressions from untrusted files, in bounded time.

A PEFT config may contain regular expressions, and a short one (`(a+)+$`) can make Python's matcher run for years. This
matcher tracks the set of all positions that a prefix of the pattern can reach, as bits of one integer. It never
backtracks, and its cost is about (length of pattern) x (length of name).

It only decides whether a pattern matches, so greedy and lazy repeats are equivalent. Python's own parser reads the
pattern, so the syntax is Python's. Back-references, look-behind, inline flags and possessive repeats are refused.
"""

import re
from collections.abc import Callable, Iterator, Sequence

# Python's own regex parser. Its name is private, but it is unchanged in 3.11 to 3.14. Its public alias has emitted a
# deprecation warning since 3.11.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN_CHARS = 8192
# Set operations, of a microsecond or two each, for all matches of one adapter. The longest patterns in practice need
# about 100 per name, so 60 000 for the linears of an 80-layer model.
MAX_STEPS = 500_000
MAX_DEPTH = 50

_Node = tuple[Any, Any]
_Mask = int

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class StepBudget:
    """The remaining steps of matching. All patterns of an adapter share one budget, because an adapter may have very
    many patterns.
    """

    __slots__ = ("left",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Raises ValueError when the budget is exceeded."""
        self.left -= steps
        if self.left < 0:
            raise ValueError("the pattern takes too long to match; simplify its repeats")


class NamePattern:
    """A regular expression over module names. Raises ValueError if it is malformed or uses a refused feature."""

    __slots__ = ("_budget", "_nodes")

    def __init__(self, pattern: str, budget: StepBudget | None = None) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(
                f"the pattern is {len(pattern)} characters long; accepted are {MAX_PATTERN_CHARS}"
            )
        try:
            parsed = parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern[:80]!r} is not a regular expression: {error}") from None
        if parsed.state.flags & ~re.UNICODE.value:
            raise ValueError(f"{pattern[:80]!r} sets inline flags, which are not accepted")
        self._budget = budget or StepBudget()
        self._nodes: Sequence[_Node] = list(parsed)
        _refuse_exotic(self._nodes)

    def matches_whole(self, name: str) -> bool:
        """Returns whether `re.fullmatch` would match. Raises ValueError if the pattern needs too many steps."""
        return bool(_Match(name, self._budget).advance(self._nodes, 1) >> len(name) & 1)

    def matches_start(self, name: str) -> bool:
        """Returns whether `re.match` would match. Raises ValueError if the pattern needs too many steps."""
        return _Match(name, self._budget).advance(self._nodes, 1) != 0


class _Match:
    """One match against one name. Bit p of a mask is set if position p, before character p, can be reached."""

    __slots__ = ("budget", "name", "where")

    def __init__(self, name: str, budget: StepBudget) -> None:
        self.name = name
        self.budget = budget
        self.where: dict[tuple[Any, int], _Mask] = {}

    def advance(self, nodes: Sequence[_Node], mask: _Mask) -> _Mask:
        for op, argument in nodes:
            if not mask:
                return 0
            mask = self._advance_one(op, argument, mask)
        return mask

    def _advance_one(self, op: Any, argument: Any, mask: _Mask) -> _Mask:
        self.budget.spend(1)
        if op in _CHARACTER_OPS:
            return (mask & self._positions(op, argument)) << 1
        if op in _REPEAT_OPS:
            return self._repeat(*argument, mask=mask)
        if op is ops.BRANCH:
            reached = 0
            for branch in argument[1]:
                reached |= self.advance(branch, mask)
            return reached
        if op is ops.SUBPATTERN:
            return self.advance(argument[3], mask)
        if op is ops.AT:
            return mask & self._anchors(argument)
        return self._look_ahead(argument[1], mask, wanted=op is ops.ASSERT)

    def _repeat(self, least: int, most: int, nodes: Sequence[_Node], *, mask: _Mask) -> _Mask:
        for _ in range(least):
            after = self.advance(nodes, mask)
            if after == mask:  # fixed point: the repeated part is empty, or more rounds reach nothing new
                break
            mask = after
            if not mask:
                return 0
        reached, frontier, rounds = mask, mask, least
        while frontier and rounds < most:
            frontier = self.advance(nodes, frontier) & ~reached
            reached |= frontier
            rounds += 1
        return reached

    def _look_ahead(self, nodes: Sequence[_Node], mask: _Mask, *, wanted: bool) -> _Mask:
        kept = 0
        for position in range(len(self.name) + 1):
            here = 1 << position
            if mask & here and (self.advance(nodes, here) != 0) == wanted:
                kept |= here
        return kept

    def _positions(self, op: Any, argument: Any) -> _Mask:
        # A character class is a list of items. The parsed pattern keeps the list alive, so its id is a unique key.
        key = (op, id(argument) if op is ops.IN else argument)
        if key not in self.where:
            self.budget.spend(10 * len(argument) if op is ops.IN else 1)
            accept = _accepts(op, argument)
            self.where[key] = sum(1 << p for p, character in enumerate(self.name) if accept(character))
        return self.where[key]

    def _anchors(self, anchor: Any) -> _Mask:
        end = 1 << len(self.name)
        if anchor in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
            return 1
        if anchor in (ops.AT_END, ops.AT_END_STRING):
            return end
        word = [False, *(c.isalnum() or c == "_" for c in self.name), False]
        boundaries = sum(1 << p for p in range(len(self.name) + 1) if word[p] != word[p + 1])
        return boundaries if anchor is ops.AT_BOUNDARY else (2 * end - 1) & ~boundaries


_CHARACTER_OPS = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN)
_REPEAT_OPS = (ops.MAX_REPEAT, ops.MIN_REPEAT)


def _accepts(op: Any, argument: Any) -> Callable[[str], bool]:
    if op is ops.ANY:
        return lambda c: c != "\n"
    if op is ops.LITERAL:
        return lambda c: ord(c) == argument
    if op is ops.NOT_LITERAL:
        return lambda c: ord(c) != argument
    return lambda c: _in_class(argument, c)


def _in_class(items: Sequence[_Node], character: str) -> bool:
    negated = items[0][0] is ops.NEGATE
    return any(_in_item(*item, character=character) for item in items[negated:]) != negated


def _in_item(op: Any, argument: Any, *, character: str) -> bool:
    if op is ops.LITERAL:
        return bool(ord(character) == argument)
    if op is ops.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    return _CATEGORIES[argument](character)


def _refuse_exotic(nodes: Sequence[_Node], depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"the regular expression nests groups deeper than {MAX_DEPTH}")
    for op, argument in nodes:
        for inner in _inner_sequences(op, argument):
            _refuse_exotic(inner, depth + 1)


def _inner_sequences(op: Any, argument: Any) -> Iterator[Sequence[_Node]]:
    if op in _REPEAT_OPS:
        yield argument[2]
    elif op is ops.BRANCH:
        yield from argument[1]
    elif op is ops.SUBPATTERN and not argument[1] and not argument[2]:
        yield argument[3]
    elif op in (ops.ASSERT, ops.ASSERT_NOT) and argument[0] > 0:
        yield argument[1]
    elif op not in _CHARACTER_OPS and op is not ops.AT:
        raise ValueError(
            f"the regular expression uses {str(op).lower()} or group flags, which is not accepted"
        )
