"""Reads from a chat template whether it shows tools to its model, and how the model writes its answers.

The effort of a model's reasoning is set with variables that its chat template reads. Some templates switch the
reasoning on and off, and some also pass the effort on to the model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from slora_api.chat.answer_reader import THINK_END
from slora_api.chat.call_format import CallFormat, find_call_format

_COMMENT = re.compile(r"\{#.*?(?:#\}|\Z)", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")
# Llama's templates read `message.tool_calls[0]`. Others loop over the calls, or pass them to a filter.
_FIRST_CALL = re.compile(r"tool_calls\b['\"\]]*\s*\[\s*0\s*\]")
_ALL_CALLS = re.compile(r"\bin\s[^%]{0,99}\btool_calls\b|tool_calls\b['\"\]]*\s*\|(?!\s*length\b)")
# Number of chat templates whose traits are cached.
_NUM_KEPT = 64

# Boolean variables. Qwen 3, GLM and SmolLM 3 use the first variable. DeepSeek V3.1 and Granite use the second one.
_TOGGLES = ("enable_thinking", "thinking")

_EFFORT = "reasoning_effort"

_EXPRESSION = re.compile(r"\{[{%].*?(?:[%}]\}|\Z)", re.DOTALL)

_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")

LEAST_EFFORTS = ("none", "minimal")

# The default effort of most of OpenAI's models. A request may send this effort even if it changes nothing.
_DEFAULT = "medium"


@dataclass(frozen=True, slots=True)
class ReasoningSwitch:
    """The variables of one chat template that set the effort of the reasoning.

    toggles: the boolean variables that the template reads. reads_effort: whether the template reads `reasoning_effort`.
    """

    toggles: tuple[str, ...]
    reads_effort: bool

    def choose_variables(self, effort: str) -> dict[str, str | bool]:
        """Returns the variables of the template that set this effort."""
        is_off = effort in LEAST_EFFORTS
        chosen: dict[str, str | bool] = dict.fromkeys(self.toggles, not is_off)
        if self.reads_effort and not (self.toggles and is_off):
            chosen[_EFFORT] = effort
        return chosen

    def list_accepted(self, *, thinks: bool) -> tuple[str, ...] | None:
        """Returns the efforts that a request may ask for; None if it may ask for any.

        thinks: whether the model may reason. For a model that never reasons, the lowest efforts are always accepted.
        """
        if self.toggles or self.reads_effort:
            return None
        return (_DEFAULT,) if thinks else (*LEAST_EFFORTS, _DEFAULT)


def find_reasoning_switch(template: str) -> ReasoningSwitch:
    """Finds the variables for the effort that a template reads. template: the template's source without comments."""
    # Blank out strings in each expression separately, because an expression that ends within a string leaves a quote
    # unpaired.
    expressions = [_STRING.sub("''", one) for one in _EXPRESSION.findall(template)]
    toggles = tuple(name for name in _TOGGLES if _reads_variable(expressions, name))
    return ReasoningSwitch(toggles, _reads_variable(expressions, _EFFORT))


def _reads_variable(expressions: Sequence[str], name: str) -> bool:
    """Returns whether the first expression with this name reads the variable. If this expression sets the variable
    instead, the template ignores the request's value.
    """
    for expression in expressions:
        num_uses = len(re.findall(rf"(?<![.\w]){name}\b", expression))
        if num_uses:
            return num_uses > 1 or re.search(rf"\b(?:set|for)\s+{name}\b", expression) is None
    return False


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
