"""Compiles grammars with the library llguidance, which computes masks from an Earley parser and a lazy lexer.

The library was chosen by measurement (bench/results/LOG.md): it compiles most schemas in a few milliseconds, and it
refuses a schema that it can't enforce instead of ignoring keywords. All forms become grammars in Lark's syntax.

The limits below bound the work of one compilation and of one mask. They do not bound everything: a `multipleOf` of a
million compiles for minutes, and a chain of thousands of rules overflows the stack. A server therefore first compiles a
form in a process that it can kill (`slora_api.sandbox.grammar_checks`).
"""

import json
import re
from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from, regex_to_lark

from slora.core.errors import RequestRefused
from slora.core.sampling_params import OutputKind, StructuredOutput
from slora.grammar.matcher import TokenSpelling
from slora.grammar.schema_form import find_keyword, prepare_schema
from slora_kernels.layout import Int32Array

# By default, the library computes forced tokens ahead of the answer. The engine does not use them, and with a long
# constant in the grammar this took 70 ms for one mask.
_OPTIONS = '%llguidance {"no_forcing": true}'
_LIMITS = LLParserLimits(
    # About 50,000 units of fuel take a millisecond.
    initial_lexer_fuel=500_000,
    # Measured with hostile grammars: 2 ms for a mask, and at most 10 ms until the library reports an exceeded limit.
    step_lexer_fuel=30_000,
    step_max_items=10_000,
    # The states of one answer take up to 5 MB.
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# The library repeats a whole regular expression in its error.
_MAX_ERROR_CHARS = 300
_SCHEMA_PREFIX = "failed to compile JSON schema: "
_ONE_OF = "oneOf constraints are not supported"
_KEYWORD = re.compile(r'Unimplemented keys: \["([^"]+)"')
_DEAD_END = (
    "no token of this model's vocabulary can come next: the grammar allows no text there, for example because a rule "
    "refers to itself without end, or no token spells that text"
)


class GrammarLibrary:
    """Compiles grammars for one vocabulary.

    eos_token_ids: the model's end-of-sequence tokens, at least one.
    """

    def __init__(self, spelling: TokenSpelling, eos_token_ids: Sequence[int]) -> None:
        vocabulary = _Vocabulary(spelling.pieces, eos_token_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(eos_token_ids))
        self._not_first = np.asarray(spelling.not_first, np.int64)
        self._num_tokens = len(spelling.pieces)

    def compile(self, output: StructuredOutput) -> "LarkGrammar":
        """Compiles a form. Raises RequestRefused, naming the field, if that fails or no answer can match the form."""
        matcher = LLMatcher(self._tokenizer, _write_lark(output), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(output, matcher.get_error())
        grammar = LarkGrammar(matcher, self._num_tokens, self._not_first)
        if grammar.first_error is not None:
            raise _refusal(output, grammar.first_error)
        return grammar


class LarkGrammar:
    """A compiled grammar, with the mask of the first token. Matchers start as copies, which takes microseconds."""

    def __init__(self, matcher: LLMatcher, num_tokens: int, not_first: npt.NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._first = np.zeros(-(-num_tokens // 32), np.int32)
        start = LarkMatcher(matcher, len(self._first), None, ())
        start.write_mask(self._first)
        bits = self._first.view(np.uint32)
        np.bitwise_and.at(bits, not_first // 32, ~(np.uint32(1) << (not_first % 32).astype(np.uint32)))
        self.first_error = start.error or (None if bits.any() else _DEAD_END)

    def start(self, stop_ids: Set[int]) -> "LarkMatcher":
        return LarkMatcher(self._matcher.deep_copy(), len(self._first), self._first, sorted(stop_ids))


class LarkMatcher:
    """A `Matcher` of the library.

    num_words: of a mask of the base model's tokens. first: the mask of the first token; None once that token was
        accepted.
    """

    def __init__(
        self, matcher: LLMatcher, num_words: int, first: Int32Array | None, stop_ids: Sequence[int]
    ) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._num_words = num_words
        self._first = first
        self._stop_ids = stop_ids

    def copy(self) -> "LarkMatcher":
        copy = LarkMatcher(self._matcher.deep_copy(), self._num_words, self._first, self._stop_ids)
        copy.error = self.error
        return copy

    def accept(self, token_id: int) -> None:
        self._first = None
        if not self._matcher.consume_token(token_id):
            self.error = _explain(self._matcher.get_error())

    def write_mask(self, words: Int32Array) -> None:
        # The last words may be those of an adapter's added tokens, which grammars do not have.
        known = words[: self._num_words]
        words[self._num_words :] = 0
        if self._first is not None:
            known[:] = self._first
        else:
            self._matcher.unsafe_compute_mask_ptr(known.ctypes.data, known.nbytes)
        if self._matcher.is_error():
            self.error = self.error or _explain(self._matcher.get_error())
            words[:] = 0
            return
        if self._stop_ids:
            bits, may_end = words.view(np.uint32), self._matcher.is_accepting()
            for token_id in (one for one in self._stop_ids if one // 32 < len(bits)):
                bit = np.uint32(1 << token_id % 32)
                bits[token_id // 32] = bits[token_id // 32] & ~bit | (bit if may_end else np.uint32(0))
        if not words.any():
            self.error = _DEAD_END


class _Vocabulary:
    """The tokens, as the library reads them."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = list(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """The library calls this only to tokenize forced text, which `_OPTIONS` (`no_forcing`) turns off."""
        return []


def _write_lark(output: StructuredOutput) -> str:
    """Returns the form in Lark's syntax. Raises RequestRefused."""
    match output.kind:
        case OutputKind.JSON_OBJECT:
            text = f"start: %json {prepare_schema({'type': 'object'})}"
        case OutputKind.JSON_SCHEMA | OutputKind.COMPACT_JSON:
            text = f"start: %json {_read_schema(output)}"
        case OutputKind.REGEX:
            text = f"start: /{regex_to_lark(output.text)}/"
        case OutputKind.CHOICE:
            # The library follows at most 2,000 alternatives of a rule at once, but any number in a terminal.
            text = f"start: CHOICE\nCHOICE: {_read_choices(output)}"
        case OutputKind.GRAMMAR:
            text = _read_grammar(output)
    return f"{text}\n{_OPTIONS}"


def _read_schema(output: StructuredOutput) -> str:
    schema = json.loads(output.text)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise RequestRefused(
            f"{output.param} has the key 'x-guidance', which is not supported; remove it", output.param
        )
    return prepare_schema(schema, is_compact=output.kind is OutputKind.COMPACT_JSON)


def _read_choices(output: StructuredOutput) -> str:
    choices = json.loads(output.text)
    if not choices:
        raise RequestRefused(f"{output.param} is an empty list; give at least one choice", output.param)
    return " | ".join(map(json.dumps, choices))


def _read_grammar(output: StructuredOutput) -> str:
    if "%llguidance" in output.text:
        raise RequestRefused(
            f"{output.param} has the directive %llguidance, which is not supported; remove it", output.param
        )
    if "::=" not in output.text:
        return output.text
    try:
        return str(grammar_from("gbnf", output.text)).replace("%llguidance {}", "")
    except ValueError as error:
        raise RequestRefused(f"{output.param} is not a valid grammar: {error}", output.param) from error


def _refusal(output: StructuredOutput, error: str) -> RequestRefused:
    why = _explain_schema(output, error) or _explain(error)
    return RequestRefused(f"{output.param} can't be enforced: {why}", output.param)


def _explain_schema(output: StructuredOutput, error: str) -> str | None:
    """Returns a message that names the place of an unsupported keyword in the schema; None for other errors."""
    keyword = "oneOf" if _ONE_OF in error else None
    if keyword is None and (found := _KEYWORD.search(error)) is not None:
        keyword = found[1]
    if keyword is None:
        return None
    is_schema = output.kind in (OutputKind.JSON_SCHEMA, OutputKind.COMPACT_JSON)
    path = find_keyword(json.loads(prepare_schema(json.loads(output.text))), keyword) if is_schema else None
    place = f"the schema has {keyword!r}" if path is None else f"the schema has {keyword!r} at {path}"
    if keyword == "oneOf":
        return f"{place}, whose branches may overlap: use anyOf, or give each branch a property with a const of its own"
    return f"{place}, which is not supported; remove it"


def _explain(error: str) -> str:
    """Returns the library's message without the dump of the grammar."""
    first, _, _ = error.partition("\n")
    if first.startswith("NoExtension"):
        return _DEAD_END
    _, _, of_schema = first.partition(_SCHEMA_PREFIX)
    details = [line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")]
    return ": ".join([(of_schema or first).removesuffix(":")[:_MAX_ERROR_CHARS], *details])
