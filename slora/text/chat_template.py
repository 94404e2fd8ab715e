"""Compiles chat templates: Jinja in a sandbox, with the names and extensions that transformers provides.

Templates come from checkpoints and from uploads, so they are untrusted programs. The sandbox blocks access to Python's
objects. It limits neither time nor memory, so a server renders tenants' templates in a separate process.

A template reads the content of a message either as a string or as a list of parts. Conversations with marks in place of
the texts show which form a template reads, and whether it leaves a message out.
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
# A template that leaves out the turns before the last message of the user on purpose has this statement.
_LAST_TURN_ONLY = re.compile(r"\{%[-+]?\s*set\s+shows_last_turn_only\s*=\s*true\s*[-+]?%\}")
# A text of this length in the prompt is the text of its message. A shorter text may occur elsewhere by accident.
_CERTAIN_CHARS = 16
# Limit of the kept results of `_find_forms`.
_NUM_KEPT_FORMS = 1_024

Messages = Sequence[Mapping[str, Any]]


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


@dataclass(frozen=True, slots=True)
class _Forms:
    """How a template reads the messages of one kind of conversation.

    in_parts: the messages whose content has to be a list of parts.
    dropped: a message of which the template shows nothing; None if it shows all messages.
    """

    in_parts: frozenset[int] = frozenset()
    dropped: int | None = None


class _KeptForms:
    """The most recently used forms, by digest of the template, its variables and the kind of the conversation."""

    def __init__(self) -> None:
        self._forms: OrderedDict[bytes, _Forms] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: bytes, find: Callable[[], _Forms]) -> _Forms:
        with self._lock:
            forms = self._forms.get(key)
            if forms is not None:
                self._forms.move_to_end(key)
                return forms
        forms = find()
        with self._lock:
            self._forms[key] = forms
            while len(self._forms) > _NUM_KEPT_FORMS:
                self._forms.popitem(last=False)
        return forms


_compiled = _CompiledTemplates()
_kept_forms = _KeptForms()


def compile_chat_template(source: str) -> jinja2.Template:
    """Compiles a template, or returns it from the cache: compiling a long template takes milliseconds.

    Raises jinja2.TemplateSyntaxError for a template that does not parse.
    """
    return _compiled.compile(source)


def render_chat(
    source: str,
    messages: Messages,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
) -> str:
    """Renders a conversation. May raise any exception, because a template is a program. Raises jinja2.TemplateError if
    the template shows nothing of a message.

    variables: further variables of the template. `add_generation_prompt` is true by default.
    """
    messages = [_with_parsed_arguments(message) for message in messages]
    names = {"add_generation_prompt": True, "tools": None, "documents": None, **special_tokens, **variables}
    template = compile_chat_template(source)

    def render(messages: Messages) -> str:
        return template.render(names | {"messages": messages})

    text, failure = "", None
    try:
        text = render(messages)
    except Exception as error:  # A template may raise any exception.
        failure = error
    if failure is None and _shows_all(text, messages):
        return text
    key = _digest(source, _kinds(messages), json.dumps(names, sort_keys=True, default=str))
    first = _find_last_turn(messages) if _LAST_TURN_ONLY.search(source) else 0
    forms = _kept_forms.find(key, lambda: _find_forms(messages, render, first))
    if forms.in_parts:
        return render(_split_into_parts(messages, forms.in_parts))
    if failure is not None:
        raise failure
    if forms.dropped is not None:
        role = messages[forms.dropped].get("role")
        raise jinja2.TemplateError(
            f"it shows nothing of message {forms.dropped} (role {role!r}); leave this message out, or use a model "
            "with a chat template that shows it"
        )
    return text


def _shows_all(text: str, messages: Messages) -> bool:
    """Returns whether the text certainly shows all messages. False means that this is not known."""
    start = 0
    for message in messages:
        content = message.get("content")
        shown = content.strip() if isinstance(content, str) else ""
        if message.get("tool_calls") or 0 < len(shown) < _CERTAIN_CHARS:
            return False
        at = text.find(shown, start)
        if at < 0:
            return False
        start = at + len(shown)
    return True


def _kinds(messages: Messages) -> str:
    """Describes the messages without their texts."""
    return json.dumps(
        [
            (
                str(message.get("role")),
                sorted(message),
                _has_text(message),
                len(message.get("tool_calls") or ()),
            )
            for message in messages
        ]
    )


def _digest(*texts: str) -> bytes:
    hashed = hashlib.sha256()
    for text in texts:
        raw = text.encode(errors="surrogatepass")
        hashed.update(b"%d:%b" % (len(raw), raw))
    return hashed.digest()


def _find_last_turn(messages: Messages) -> int:
    """Returns the position of the last message of the user; 0 if there is none."""
    return max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)


def _find_forms(messages: Messages, render: Callable[[Messages], str], first: int) -> _Forms:
    """first: the template may leave out messages of users, assistants and tools before this one."""
    marked = [_with_marks(message, index) for index, message in enumerate(messages)]
    wanted = {
        index: marks
        for index, message in enumerate(messages)
        if (index >= first or message.get("role") not in ("user", "assistant", "tool"))
        and (marks := _list_marks(message, index))
    }

    def list_hidden(in_parts: frozenset[int]) -> frozenset[int] | None:
        """Returns the messages that the template does not show; None if it refuses them."""
        try:
            text = render(_split_into_parts(marked, in_parts)).lower()
        except Exception:  # A template may raise any exception.
            return None
        return frozenset(index for index, marks in wanted.items() if not all(mark in text for mark in marks))

    hidden = list_hidden(frozenset())
    if hidden is not None and not hidden:
        return _Forms()
    texts = frozenset(index for index, message in enumerate(messages) if _has_text(message))
    roles = dict.fromkeys(str(message.get("role")) for message in messages)
    of_role = [frozenset(at for at in texts if str(messages[at].get("role")) == role) for role in roles]
    for in_parts in dict.fromkeys(((hidden or frozenset()) & texts, texts, *of_role)):
        hidden_parts = list_hidden(in_parts) if in_parts else None
        if hidden_parts is not None:
            if not hidden_parts:
                return _Forms(in_parts)
            hidden = hidden_parts if hidden is None else hidden
    return _Forms(dropped=min(hidden, default=None) if hidden is not None else None)


def _has_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _list_marks(message: Mapping[str, Any], index: int) -> list[str]:
    """Returns the marks that a template has to show. Many templates leave out the text of a message with calls."""
    calls = message.get("tool_calls") or ()
    if calls:
        return [_mark_of(index, number) for number in range(len(calls))]
    return [_mark_of(index)] if _has_text(message) else []


def _with_marks(message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Replaces the text and the names of the called functions by marks."""
    marked = dict(message)
    if _has_text(message):
        marked["content"] = f"{_mark_of(index)} and more text"
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _mark_of(index, number)}}
            for number, call in enumerate(message["tool_calls"])
        ]
    return marked


def _mark_of(index: int, number: int | None = None) -> str:
    return f"sloratext{index}end" if number is None else f"sloracall{index}of{number}end"


def _split_into_parts(messages: Messages, in_parts: frozenset[int]) -> list[Mapping[str, Any]]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if index in in_parts
        else message
        for index, message in enumerate(messages)
    ]


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
