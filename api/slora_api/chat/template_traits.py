"""What a chat template shows about its model: whether it reads tools, and how the model writes its answers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from slora_api.chat.answer_reader import THINK_END
from slora_api.chat.call_format import CallFormat, find_call_format

__all__ = ["TemplateTraits", "read_traits"]

_TOOLS = re.compile(r"\btools\b")
# Templates of adapters that are used at the same time.
_NUM_KEPT = 64


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """reads_tools: the template shows the tools of a request to the model. reads_calls: the same for the tool calls of
    earlier answers. call_format: None if it is unknown. thinks: the model may begin an answer with reasoning.
    """

    reads_tools: bool
    reads_calls: bool
    call_format: CallFormat | None
    thinks: bool


@lru_cache(_NUM_KEPT)
def read_traits(template: str) -> TemplateTraits:
    """Judges a template by its text, comments excepted."""
    text = "".join(_without_comments(template))
    return TemplateTraits(
        _TOOLS.search(text) is not None, "tool_calls" in text, find_call_format(text), THINK_END in text
    )


def _without_comments(template: str) -> Iterator[str]:
    rest = template
    while rest:
        text, _, comment = rest.partition("{#")
        yield text
        rest = comment.partition("#}")[2]
