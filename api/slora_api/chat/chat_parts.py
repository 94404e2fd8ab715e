"""The JSON of answers with tool calls and reasoning, in OpenAI's form and with vLLM's fields for reasoning."""

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from slora.core.request import FinishReason
from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax
from slora_api.chat.text_reader import Piece, PieceKind
from slora_api.chat.tool_schemas import read_custom_input

# The number of letters and digits that Mistral's templates require in an id.
_SHORT_CHARS = 9


def make_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def shorten_call_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replaces each call id that Mistral's templates refuse by a short hash of the id. messages: as
    `ChatMessage.for_template` makes them; changed in place.
    """
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = _shorten(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = _shorten(message["tool_call_id"])


def _shorten(call_id: str) -> str:
    if len(call_id) == _SHORT_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_CHARS]


Json = dict[str, Any]


class ChatParts:
    """Makes the JSON fields of the answers to one request.

    shows_reasoning: false leaves the reasoning out. is_legacy: whether a call is written as OpenAI's older
    `function_call`.
    """

    def __init__(self, syntax: AnswerSyntax, *, shows_reasoning: bool, is_legacy: bool = False) -> None:
        self._shows_reasoning = shows_reasoning
        self._is_legacy = is_legacy
        self._syntax = syntax
        # Choice -> its reader.
        self._readers: defaultdict[int, AnswerReader] = defaultdict(lambda: AnswerReader(syntax))
        # Choice -> the call of a custom tool that is being written, and the parts of its arguments. Its input is sent
        # in one piece, because it can be read only from complete arguments.
        self._custom: dict[int, tuple[Json, list[str]]] = {}

    def deltas(self, choice: int, text: str, *, is_last: bool) -> list[Json]:
        """Returns the field `delta` of each chunk that is made from the text."""
        reader = self._readers[choice]
        made = []
        num_calls = reader.num_calls
        for piece in reader.push(text, is_last=is_last):
            if piece.kind is PieceKind.ARGUMENTS and choice in self._custom:
                self._custom[choice][1].append(piece.text)
                continue
            made += self._end_custom(choice)
            if piece.kind is PieceKind.CALL:
                num_calls += 1
                if piece.text in self._syntax.custom_names:
                    self._custom[choice] = {"index": num_calls - 1, **_new_call(piece.text)}, []
                    continue
            if (delta := self._delta(piece, num_calls - 1)) is not None:
                made.append(delta)
        return made + self._end_custom(choice) if is_last else made

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        """Returns the finish reason to show. For a complete answer with calls, this is `tool_calls`, unless the request
        named the tool.
        """
        has_calls = self._readers[choice].num_calls > 0 and not self._syntax.names_tool
        if not has_calls or reason is not FinishReason.STOP:
            return reason
        return "function_call" if self._is_legacy else "tool_calls"

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
        if calls and self._is_legacy:
            return made | {"function_call": calls[0]["function"]}
        return made | {"tool_calls": [self._finish_call(call) for call in calls]} if calls else made

    def _end_custom(self, choice: int) -> list[Json]:
        """Returns the delta with the call of a custom tool that is complete, if there is one."""
        if choice not in self._custom:
            return []
        call, arguments = self._custom.pop(choice)
        call["function"]["arguments"] = "".join(arguments)
        return [{"tool_calls": [self._finish_call(call)]}]

    def _finish_call(self, call: Json) -> Json:
        """Returns a complete call in the form of its tool."""
        function = call["function"]
        if function["name"] not in self._syntax.custom_names:
            return call
        custom = {"name": function["name"], "input": read_custom_input(function["arguments"])}
        kept = {name: value for name, value in call.items() if name != "function"}
        return kept | {"type": "custom", "custom": custom}

    def _delta(self, piece: Piece, index: int) -> Json | None:
        match piece.kind:
            case PieceKind.REASONING:
                return _reasoning(piece.text) if self._shows_reasoning else None
            case PieceKind.CONTENT:
                return {"content": piece.text}
            case PieceKind.CALL if self._is_legacy:
                return {"function_call": _new_call(piece.text)["function"]}
            case PieceKind.ARGUMENTS if self._is_legacy:
                return {"function_call": {"arguments": piece.text}}
            case PieceKind.CALL:
                return {"tool_calls": [{"index": index, **_new_call(piece.text)}]}
            case PieceKind.ARGUMENTS:
                return {"tool_calls": [{"index": index, "function": {"arguments": piece.text}}]}


def _new_call(name: str) -> Json:
    return {"id": make_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def _reasoning(text: str) -> Json:
    return {"reasoning": text, "reasoning_content": text}
