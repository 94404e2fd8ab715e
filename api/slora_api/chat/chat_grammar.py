"""Writes grammars of answers whose tool calls are valid under the schemas of their tools.

The grammars are in the variant of Lark's syntax that `slora.grammar` compiles.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slora.core.sampling_params import OPTIONS_KEY
from slora.grammar.schema_form import prepare_schema
from slora_api.chat.answer_reader import THINK_END, THINK_START, AnswerSyntax

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ChatGrammar:
    """The answers that a request allows. An answer may begin with reasoning if the model thinks. The rest is tool
    calls, a JSON text, or the model's choice of the two.

    tools: name and parameter schema of each tool that an answer may call; empty if it may call none.
    is_single: whether an answer has at most one call.
    schema: the JSON schema of an answer without calls, as JSON; None if an answer must have calls or may be any text.
    is_compact: whether an answer without calls has no white space between the tokens of JSON.
    allows_text: whether an answer may have any text before, between and after its calls.
    special_ids: the token ids of markers that are special tokens. Ordinary tokens cannot spell these markers.
    """

    syntax: AnswerSyntax
    tools: Sequence[tuple[str, Mapping[str, Any] | None]]
    is_single: bool
    schema: str | None
    special_ids: Mapping[str, int]
    allows_text: bool = False
    is_compact: bool = False

    def write(self) -> str:
        parts, lines = [], []
        if self.syntax.thinks:
            lines += self._write_thought()
        if self.tools:
            lines += self._write_calls()
            parts.append("free" if self.allows_text else "calls")
        if self.schema is not None:
            parts.append("form")
            schema = prepare_schema(json.loads(self.schema), is_compact=self.is_compact)
            lines.append(f"form: %json {_escape(schema)}")
        return "\n".join([f"start: {self._thought()} ({' | '.join(parts)})", *lines])

    def _thought(self) -> str:
        if not self.syntax.thinks:
            return ""
        if not self.syntax.prompt_thinks:
            return f"({self._literal(THINK_START)} thought)?"
        # If any text is allowed, the answer may also consist of reasoning that does not end.
        return "thought?" if self.allows_text and THINK_END not in self.special_ids else "thought"

    def _write_thought(self) -> list[str]:
        if THINK_END in self.special_ids:
            return [f"thought: /(.|\\n)*/ {self._literal(THINK_END)} /\\n{{0,2}}/"]
        return ["thought: thinking /\\n{0,2}/", f"thinking[suffix={json.dumps(THINK_END)}]: /(.|\\n)*/"]

    def _write_calls(self) -> list[str]:
        assert self.syntax.calls is not None, "an answer with calls has a format"
        layout = self.syntax.calls.layout
        opener, rest = layout.around[0][:1], layout.around[0][1:]
        first, between, last = map(self._literals, (rest, *layout.around[1:]))
        begin, middle, end = map(self._literals, layout.within)
        more = "" if self.is_single else f"({between} call)*"
        lines = [f"calls: {self._literals(opener)} block", f"block: {first} call {more} {last}"]
        if self.allows_text:
            lines += self._write_text(*opener)
        lines.append(f"call: {' | '.join(f'call_{index}' for index in range(len(self.tools)))}")
        for index, (name, schema) in enumerate(self.tools):
            plain = {"type": "object"} | dict(_NO_PARAMETERS if schema is None else schema)
            plain.pop(OPTIONS_KEY, None)
            lines.append(f"call_{index}: {begin} {json.dumps(name)} {middle} arguments_{index} {end}")
            lines.append(f"arguments_{index}: %json {_escape(prepare_schema(plain))}")
        return lines

    def _write_text(self, opener: str = "") -> list[str]:
        """Writes the rules for answers with any text. The opener begins a block wherever it occurs. If the format has
        no opener, an answer that begins with a bracket is a call.
        """
        times = "?" if self.is_single else "*"
        if not opener:
            begins_otherwise = rf"\s*([\[{{]|{re.escape(THINK_START)})" if self.syntax.thinks else r"\s*[\[{]"
            return ["free: calls | TEXT?", f"TEXT: /(?s:.+)/ & ~/{begins_otherwise}(?s:.*)/"]
        if opener in self.special_ids:
            return [f"free: TEXT? ({self._literal(opener)} block TEXT?){times}", "TEXT: /(?s:.+)/"]
        return [
            f"free: (before block){times} TEXT?",
            f"before[suffix={json.dumps(opener)}]: /(?s:.*)/",
            f"TEXT: /(?s:.+)/ & ~/(?s:.*){re.escape(opener)}(?s:.*)/",
        ]

    def _literals(self, texts: Sequence[str]) -> str:
        return " ".join(map(self._literal, texts))

    def _literal(self, text: str) -> str:
        return f"<[{self.special_ids[text]}]>" if text in self.special_ids else json.dumps(text)


def _escape(schema: str) -> str:
    """Escapes the directive `%llguidance` within the strings of a schema, because `slora.grammar` refuses it."""
    return schema.replace("%llguidance", r"\u0025llguidance")
