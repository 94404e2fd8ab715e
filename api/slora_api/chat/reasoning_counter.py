"""Counts the tokens of the reasoning at the beginning of answers, as the answers arrive."""

from dataclasses import dataclass

from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax


@dataclass(slots=True)
class _Count:
    """The state of one answer. reader: None once the reasoning is over, or if there is none."""

    reader: AnswerReader | None
    num_tokens: int = 0
    num_reasoning: int = 0


class ReasoningCounter:
    """Counts the tokens of the reasoning, including the token that completes the end marker.

    A token is counted when its text arrives. If a stop string begins like the end marker, the marker's text may arrive
    one token late.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax = AnswerSyntax(syntax.thinks, syntax.prompt_thinks)
        # Choice -> its count.
        self._counts: dict[int, _Count] = {}

    @staticmethod
    def of(syntax: AnswerSyntax | None) -> "ReasoningCounter | None":
        return None if syntax is None or not syntax.thinks else ReasoningCounter(syntax)

    def add(self, choice: int, num_tokens: int, text: str, *, is_last: bool) -> int:
        """Adds the next part of a choice. Returns the increase of the choice's count of reasoning tokens."""
        count = self._counts.get(choice)
        if count is None:
            count = self._counts[choice] = _Count(AnswerReader(self._syntax))
        reader = count.reader
        if reader is None:
            return 0
        count.num_tokens += num_tokens
        has_content = any(reader.push(text, is_last=is_last))
        known = count.num_reasoning
        if reader.has_thought:
            count.num_reasoning = count.num_tokens
        if not reader.is_thinking and (reader.has_thought or has_content):
            count.reader = None
        return count.num_reasoning - known
