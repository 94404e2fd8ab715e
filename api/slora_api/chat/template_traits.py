"""Reads from a chat template whether it shows tools to its model, and how the model writes its answers."""

import re
from dataclasses import dataclass
from functools import lru_cache

from slora_api.chat.answer_reader import THINK_END
from slora_api.chat.call_format import CallFormat, find_call_format
from slora_api.chat.reasoning_switch import ReasoningSwitch, find_reasoning_switch

_COMMENT = re.compile(r"\{#.*?(?:#\}|\Z)", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")
# Llama's templates read `message.tool_calls[0]`. Others loop over the calls, or pass them to a filter.
_FIRST_CALL = re.compile(r"tool_calls\b['\"\]]*\s*\[\s*0\s*\]")
_ALL_CALLS = re.compile(r"\bin\s[^%]{0,99}\btool_calls\b|tool_calls\b['\"\]]*\s*\|(?!\s*length\b)")
# Number of chat templates whose traits are cached.
_NUM_KEPT = 64


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The traits of one chat template.

    reads_tools: whether the template shows the tools of a request to the model.
    max_calls: how many tool calls of an earlier answer the template shows; None if it shows all.
    call_format: the format of tool calls; None if it is unknown.
    thinks: whether the model may begin an answer with reasoning.
    switch: how a request sets the effort of the reasoning.
    """

    reads_tools: bool
    max_calls: int | None
    call_format: CallFormat | None
    thinks: bool
    switch: ReasoningSwitch


@lru_cache(_NUM_KEPT)
def read_traits(template: str) -> TemplateTraits:
    """Reads the traits from the template's source, ignoring Jinja comments."""
    text = _COMMENT.sub("", template)
    return TemplateTraits(
        _TOOLS.search(text) is not None,
        _find_max_calls(text),
        find_call_format(text),
        THINK_END in text,
        find_reasoning_switch(text),
    )


def _find_max_calls(template: str) -> int | None:
    if "tool_calls" not in template:
        return 0
    return 1 if _FIRST_CALL.search(template) and not _ALL_CALLS.search(template) else None
