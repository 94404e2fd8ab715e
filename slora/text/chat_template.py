"""Compiles chat templates: Jinja in a sandbox, with the names and extensions that transformers provides.

Templates come from checkpoints and from uploads, so they are untrusted programs. The sandbox blocks access to Python's
objects. It limits neither time nor memory, so a server renders tenants' templates in a separate process.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["RESERVED_NAMES", "compile_chat_template", "cut_at_mark", "mark_end", "render_chat"]

# The variables and functions of every template. A request cannot replace them.
RESERVED_NAMES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"}
)
# Private-use characters, which do not occur by accident. A template that strips a message also strips the space.
_MARK = "\ue0cf\ue0ce\ue0cf "
# Limit of the compiled templates that are kept, in characters of source. Compiled code needs up to a hundred times the
# memory of its source.
_MAX_KEPT_CHARS = 1 << 19
# A template counts as at least this many characters, because even a short one needs some memory.
_MIN_CHARS = 1_000


class _GenerationMark(Extension):
    """Renders the body of `{% generation %}` ... `{% endgeneration %}`, which marks the model's text for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _UnfoldedCode(CodeGenerator):
    """Evaluates constant expressions only when rendering, because 60 bytes of source can produce gigabytes of text."""

    def _output_child_to_const(
        self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo
    ) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _UnfoldedCode
    # Python would compute products of constants when it compiles the generated code. An intercepted operator is
    # generated as a function call, which Python evaluates only when rendering.
    intercepted_binops = frozenset({"*"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationMark]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


class _CompiledTemplates:
    """The most recently used templates, bounded in number and in total length of source."""

    def __init__(self) -> None:
        self._environment = _Environment()
        self._templates: OrderedDict[str, jinja2.Template] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def compile(self, source: str) -> jinja2.Template:
        with self._lock:
            template = self._templates.get(source)
            if template is not None:
                self._templates.move_to_end(source)
                return template
        template = self._environment.from_string(source)
        with self._lock:
            if source not in self._templates:
                self._num_chars += max(len(source), _MIN_CHARS)
            self._templates[source] = template
            while self._num_chars > _MAX_KEPT_CHARS:
                oldest, _ = self._templates.popitem(last=False)
                self._num_chars -= max(len(oldest), _MIN_CHARS)
        return template


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML; prompts must not contain HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_compiled = _CompiledTemplates()


def compile_chat_template(source: str) -> jinja2.Template:
    """Compiles a template, or returns it from the cache: compiling a long template takes milliseconds.

    Raises jinja2.TemplateSyntaxError for a template that does not parse.
    """
    return _compiled.compile(source)


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
) -> str:
    """Renders a conversation. May raise any exception, because a template is a program.

    variables: further variables of the template. `add_generation_prompt` is true by default.
    """
    messages = [_with_parsed_arguments(message) for message in messages]
    names = {"add_generation_prompt": True, "tools": None, "documents": None, **special_tokens, **variables}
    return compile_chat_template(source).render(names | {"messages": messages})


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts the arguments of tool calls from JSON text, as in OpenAI's API, to objects, as templates expect.

    A string that is not a JSON object stays as it is, because a model may write invalid JSON. Arguments that are not
    strings also stay as they are.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [{**call, "function": _parse_arguments(call["function"])} for call in calls],
    }


def _parse_arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    text = function.get("arguments")
    if not isinstance(text, str):
        return function
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return function
    return {**function, "arguments": _Arguments(arguments)} if isinstance(arguments, dict) else function


class _Arguments(dict[str, Any]):
    """The arguments of a call as an object. A template may also append it to a string as JSON, as DeepSeek's do."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages with a mark at the end of the last one, for `cut_at_mark`."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"] + _MARK}]


def cut_at_mark(rendered: str) -> str | None:
    """Cuts a rendered conversation after the text of its last message, as transformers does.

    Returns None if the template has left out the end of this text.
    """
    text, mark, rest = rendered.rpartition(_MARK.rstrip())
    if not mark:
        return None
    # If the space is gone, the template strips messages. Without the mark, it would have stripped `text`.
    return text if rest.startswith(" ") else text.rstrip()
