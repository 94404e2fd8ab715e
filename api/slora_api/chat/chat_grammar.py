"""Writes grammars of answers that must call a tool, or that may have reasoning or tool calls beside a required form.

They are in Lark's syntax, as `slora.grammar` compiles it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slora_api.chat.answer_reader import THINK_END, THINK_START, AnswerSyntax

__all__ = ["ChatGrammar"]

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# The option of the grammar library that a schema may hold. It is no keyword of JSON Schema.
_OPTIONS_KEY = "x-guidance"


@dataclass(frozen=True, slots=True)
class ChatGrammar:
    """The answers that a request allows: tool calls, a JSON text, or either.

    tools: names with the schemas of the parameters; an answer may call these. Empty: no calls.
    is_single: whether an answer has at most one call.
    schema: the JSON schema of an answer without calls, as JSON; None: it must have calls.
    special_ids: the ids of markers that are special tokens, which text cannot spell.
    """

    syntax: AnswerSyntax
    tools: Sequence[tuple[str, Mapping[str, Any] | None]]
    is_single: bool
    schema: str | None
    special_ids: Mapping[str, int]

    def write(self) -> str:
        parts = [
            part
            for part, is_used in (("calls", bool(self.tools)), ("form", self.schema is not None))
            if is_used
        ]
        lines = [f"start: {self._thought()} ({' | '.join(parts)})"]
        if self.syntax.thinks:
            lines += self._write_thought()
        if self.tools:
            lines += self._write_calls()
        if self.schema is not None:
            lines.append(f"form: %json {self.schema}")
        return "\n".join(lines)

    def _thought(self) -> str:
        if not self.syntax.thinks:
            return ""
        return "thought" if self.syntax.prompt_thinks else f"({self._literal(THINK_START)} thought)?"

    def _write_thought(self) -> list[str]:
        if THINK_END in self.special_ids:
            return [f"thought: /(.|\\n)*/ {self._literal(THINK_END)} /\\n{{0,2}}/"]
        return ["thought: thinking /\\n{0,2}/", f"thinking[suffix={json.dumps(THINK_END)}]: /(.|\\n)*/"]

    def _write_calls(self) -> list[str]:
        assert self.syntax.calls is not None, "an answer with calls has a format"
        layout = self.syntax.calls.layout
        first, between, last = map(self._literals, layout.around)
        begin, middle, end = map(self._literals, layout.within)
        more = "" if self.is_single else f"({between} call)*"
        lines = [f"calls: {first} call {more} {last}"]
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(self.tools)))}")
        for index, (name, schema) in enumerate(self.tools):
            plain = {key: value for key, value in (schema or _NO_PARAMETERS).items() if key != _OPTIONS_KEY}
            lines.append(f"call_{index}: {begin} {json.dumps(name)} {middle} arguments_{index} {end}")
            lines.append(f"arguments_{index}: %json {json.dumps(plain or _NO_PARAMETERS)}")
        return lines

    def _literals(self, texts: Sequence[str]) -> str:
        return " ".join(map(self._literal, texts))

    def _literal(self, text: str) -> str:
        return f"<[{self.special_ids[text]}]>" if text in self.special_ids else json.dumps(text)
