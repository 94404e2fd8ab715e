"""Compiles chat templates: Jinja in a sandbox, with the names and extensions that transformers provides.

Templates come from checkpoints and from uploads, so they are untrusted programs. The sandbox blocks access to Python's
objects. It limits neither time nor memory, so a server renders tenants' templates in a separate process.
"""

import json
import threading
from collections import OrderedDict
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["compile_chat_template"]

# Limit of the compiled templates that are kept, in characters of source. Compiled code needs up to a hundred times the
# memory of its source.
_MAX_KEPT_CHARS = 1 << 19
# A template counts as at least this many characters, because even a short one needs some memory.
_MIN_CHARS = 1_000


class _GenerationMark(Extension):
    """Renders the body of `{% generation %}` ... `{% endgeneration %}`, which marks the model's words for training."""

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
