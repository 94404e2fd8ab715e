"""The JSON of answers with tool calls and reasoning, in OpenAI's form and with vLLM's fields for reasoning."""

from collections import defaultdict
from typing import Any

from slora.request import FinishReason
from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax
from slora_api.chat.call_ids import make_call_id
from slora_api.chat.piece import Piece, PieceKind

__all__ = ["ChatParts"]

Json = dict[str, Any]


class ChatParts:
    """Makes the JSON fields of the answers to one request. shows_reasoning: false leaves the reasoning out."""

    def __init__(self, syntax: AnswerSyntax, *, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self._syntax = syntax
        # Choice -> its reader.
        self._readers: defaultdict[int, AnswerReader] = defaultdict(lambda: AnswerReader(syntax))

    def deltas(self, choice: int, text: str, *, is_last: bool) -> list[Json]:
        """Returns the field `delta` of each chunk that is made from the text."""
        reader = self._readers[choice]
        made = []
        num_calls = reader.num_calls
        for piece in reader.push(text, is_last=is_last):
            if piece.kind is PieceKind.CALL:
                num_calls += 1
            if (delta := self._delta(piece, num_calls - 1)) is not None:
                made.append(delta)
        return made

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        """Returns the finish reason to show. For a complete answer with calls, this is `tool_calls`, unless the request
        named the tool.
        """
        has_calls = self._readers[choice].num_calls > 0 and not self._syntax.names_tool
        return "tool_calls" if has_calls and reason is FinishReason.STOP else reason

    def message(self, choice: int, text: str) -> Json:
        """Returns the field `message` of a complete answer."""
        reasoning, content = "", ""
        calls: list[Json] = []
        for piece in self._readers[choice].push(text, is_last=True):
            match piece.kind:
                case PieceKind.REASONING:
                    reasoning += piece.text
                case PieceKind.CONTENT:
                    content += piece.text
                case PieceKind.CALL:
                    calls.append(_new_call(piece.text))
                case PieceKind.ARGUMENTS:
                    calls[-1]["function"]["arguments"] += piece.text
        has_content = bool(content) or not (calls or reasoning)
        made: Json = {"role": "assistant", "content": content if has_content else None, "refusal": None}
        if reasoning and self._shows_reasoning:
            made |= _reasoning(reasoning)
        return made | {"tool_calls": calls} if calls else made

    def _delta(self, piece: Piece, index: int) -> Json | None:
        match piece.kind:
            case PieceKind.REASONING:
                return _reasoning(piece.text) if self._shows_reasoning else None
            case PieceKind.CONTENT:
                return {"content": piece.text}
            case PieceKind.CALL:
                return {"tool_calls": [{"index": index, **_new_call(piece.text)}]}
            case PieceKind.ARGUMENTS:
                return {"tool_calls": [{"index": index, "function": {"arguments": piece.text}}]}


def _new_call(name: str) -> Json:
    return {"id": make_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def _reasoning(text: str) -> Json:
    return {"reasoning": text, "reasoning_content": text}
