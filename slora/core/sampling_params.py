"""How the tokens of one request are sampled. Names and meanings are OpenAI's, or vLLM's where OpenAI has none.

`slora.core.request_check` checks what depends on the model and the engine.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from slora.core.errors import RequestRefused

_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_surrogate(text: str, name: str, param: str) -> None:
    """Raises RequestRefused if `text` holds a lone surrogate: half of a UTF-16 pair, which a Python string can hold but
    no encoded text can. name: the name of the text in the message.

    JSON escapes and decoding with `surrogateescape` produce lone surrogates. Tokenizers, message formats and databases
    fail on them.
    """
    found = _SURROGATE.search(text)
    if found is not None:
        raise RequestRefused(
            f"{name} has the lone surrogate {found[0]!a} at character {found.start()}, which is not "
            "valid Unicode text; remove the surrogate or decode the text again",
            param,
        )


MAX_FORM_CHARS = 65_536
# The most compiled grammars that the engine keeps, for all tenants together and for one tenant. A typical grammar takes
# 50 KB, and the largest that a server accepts takes 10 MB. The API remembers the same numbers of forms, so that a form
# that the engine compiles again is also charged again. Tenants never share a grammar: a fast first token would reveal
# that another tenant uses it.
MAX_CACHED_FORMS = 512
MAX_CACHED_FORMS_OF_TENANT = 64
MISSING_LIBRARY = (
    "structured output needs the package llguidance, which is not installed: pip install 'slora[serve]'"
)
# The key of a schema in which the grammar library looks for options. It is no keyword of JSON Schema.
OPTIONS_KEY = "x-guidance"


class OutputKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    COMPACT_JSON = "compact_json"  # a JSON schema, for JSON without white space
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an answer must have: a JSON schema, any JSON object, a regular expression, a choice of strings, or
    a grammar. It is a plain value, which `slora.grammar` compiles. Raises RequestRefused, which names `param`, for a
    form that is too long.

    An answer that ends with finish_reason `stop` has this form, unless a stop string has cut it off.
    """

    kind: OutputKind
    # A JSON schema, the regular expression in Rust's syntax, a JSON list of choices, or the grammar in Lark's syntax
    # or GBNF. Empty for JSON_OBJECT.
    text: str
    param: str = "structured_output"  # The field of the request that holds the form. Errors name it.

    def __post_init__(self) -> None:
        refuse_surrogate(self.text, self.param, self.param)
        if len(self.text) > MAX_FORM_CHARS:
            raise RequestRefused(
                f"{self.param} has {len(self.text)} characters; at most {MAX_FORM_CHARS} are accepted, so "
                "shorten it",
                self.param,
            )

    @staticmethod
    def json_schema(
        schema: Mapping[str, Any] | bool, param: str = "structured_output", *, is_compact: bool = False
    ) -> "StructuredOutput":
        if isinstance(schema, Mapping) and OPTIONS_KEY in schema:
            raise RequestRefused(
                f"{param} has the key {OPTIONS_KEY!r}, which is not supported; remove it", param
            )
        kind = OutputKind.COMPACT_JSON if is_compact else OutputKind.JSON_SCHEMA
        return StructuredOutput(kind, json.dumps(schema, separators=(",", ":")), param)

    @staticmethod
    def json_object(param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.JSON_OBJECT, "", param)

    @staticmethod
    def regex(pattern: str, param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.REGEX, pattern, param)

    @staticmethod
    def choice(choices: Sequence[str], param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.CHOICE, json.dumps(list(choices)), param)

    @staticmethod
    def grammar(text: str, param: str = "structured_output") -> "StructuredOutput":
        return StructuredOutput(OutputKind.GRAMMAR, text, param)


MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 32
# Each word has a second spelling, which begins with a space.
MAX_BAD_WORD_CHARS = 64
# A space and four bytes for each character.
MAX_BAD_WORD_TOKENS = 1 + 4 * MAX_BAD_WORD_CHARS
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_CHOICES = 128
MAX_LOGPROB_TOKEN_IDS = 128
# Limit of length_penalty. Any length raised to this power still fits into a float.
_MAX_LENGTH_PENALTY = 10
_MAX_SEED = 2**63
# The limit of counts and token ids. No context and no vocabulary exceeds this size. Without a limit, an integer might
# exceed the 64 bits of the messages to the engine process.
_MAX_COUNT = 2**31 - 1
_MASK = 2**64 - 1


_Limit = TypeVar("_Limit")


class _Range(NamedTuple):
    """The accepted values of a number. remark: the end of the error message."""

    least: float
    most: float
    remark: str = ""


class _Beams(NamedTuple):
    """A field that beam search does not support. neutral: the only value that it accepts.

    is_chance: whether the field only controls the drawing of tokens. Beam search then ignores a model's default.
    """

    neutral: float
    is_chance: bool = False


class _Items(NamedTuple):
    """most: the maximum number of items. unit: what error messages call them. are_ids: whether they are token ids."""

    most: int
    unit: str = "ids"
    are_ids: bool = False


def _field(default: Any, *limits: _Range | _Beams | _Items) -> Any:
    """Declares a field with the limits that `SamplingParams` checks."""
    made: Mapping[str, Any] = {type(limit).__name__: limit for limit in limits}
    if callable(default):
        return field(default_factory=default, metadata=made)
    return field(default=default, metadata=made)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request. Raises RequestRefused, which names the field, for a value out of range.

    A request body that has a field with the name of one of these sets it (`slora_api.completions.prompts`).
    """

    # None means as many as the context and the pool allow.
    max_tokens: int | None = _field(16, _Range(1, _MAX_COUNT))
    # 0 is greedy; then top_p, top_k, min_p and seed have no effect.
    temperature: float = _field(1.0, _Range(0, 2), _Beams(0.0, is_chance=True))
    # 1 is off, and 0 keeps only the most likely token.
    top_p: float = _field(1.0, _Range(0, 1), _Beams(1.0, is_chance=True))
    top_k: int = _field(0, _Range(0, _MAX_COUNT, "; 0 is off"), _Beams(0, is_chance=True))
    # Minimum probability of a token relative to the most probable token; 0 is off.
    min_p: float = _field(0.0, _Range(0, 1), _Beams(0.0, is_chance=True))
    # OpenAI's, over the tokens generated so far; 0 is off.
    presence_penalty: float = _field(0.0, _Range(-2, 2), _Beams(0.0))
    frequency_penalty: float = _field(0.0, _Range(-2, 2), _Beams(0.0))
    # transformers', over the tokens of prompt and answer; 1 is off. Beyond the limits, logits could overflow float32.
    repetition_penalty: float = _field(1.0, _Range(0.01, 100), _Beams(1.0))
    # Token id -> value added to the token's logit.
    logit_bias: Mapping[int, float] = _field(dict, _Items(MAX_LOGIT_BIAS, "tokens"))
    # The only tokens that may be sampled, stop tokens included; None allows all.
    allowed_token_ids: tuple[int, ...] | None = _field(None, _Items(MAX_ALLOWED_TOKEN_IDS, are_ids=True))
    # Token sequences that never occur in an answer. Tokens of the prompt do not count.
    bad_words: tuple[tuple[int, ...], ...] = _field((), _Items(MAX_BAD_SEQUENCES, "token sequences"))
    # Before this many tokens are generated, no stop token is sampled and no stop string ends the answer.
    min_tokens: int = _field(0, _Range(0, _MAX_COUNT))
    seed: int | None = None  # The same seed gives the same tokens in any batch.
    # Strings that end the text; matched on decoded text, outside the engine.
    stop: tuple[str, ...] = _field((), _Items(MAX_STOP_STRINGS, "strings"))
    stop_token_ids: tuple[int, ...] = _field((), _Items(MAX_STOP_TOKEN_IDS, are_ids=True))
    ignore_eos: bool = False
    # The number k of most probable tokens whose log-probabilities are returned, and the chosen token's; None is off.
    logprobs: int | None = _field(None, _Range(0, MAX_LOGPROBS))
    # vLLM's; with `logprobs`, the log-probabilities of the chosen token and of these tokens are returned, instead of
    # those of the most probable tokens.
    logprob_token_ids: tuple[int, ...] = _field((), _Items(MAX_LOGPROB_TOKEN_IDS, are_ids=True))
    # Like `logprobs`, for each prompt token except the first, which has no preceding token.
    prompt_logprobs: int | None = _field(None, _Range(0, MAX_LOGPROBS))
    # Number of answers; each is sampled with its own seed (`choice_seed`). The prompt is computed once.
    n: int = 1
    # Number of answers to sample; the n most probable by the sum of their log-probabilities are returned. None means
    # n. The engine returns all sampled answers, and the caller selects the n most probable.
    best_of: int | None = None
    # vLLM's; returns the n best hypotheses of a search with best_of beams instead of sampling (`beam_search`). No
    # token is reported before the search is over.
    use_beam_search: bool = False
    # A hypothesis' sum of log-probabilities is divided by its length to this power.
    length_penalty: float = _field(1.0, _Range(-_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY))
    early_stopping: bool = False  # Whether the search ends as soon as there are best_of hypotheses.
    # Whether the text includes the stop string or stop token that ended it.
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # Whether the text leaves out special tokens.
    # The form of the answers; None is any text. A stop token is sampled only where the answer may end.
    structured_output: StructuredOutput | None = None
    # Whether tokens may be drafted from the request's own text (`slora.scheduler.drafting`). The answers are the same
    # with and without it.
    prompt_lookup: bool = True

    def __post_init__(self) -> None:
        for name, limits in _RANGES.items():
            self._check_between(name, limits)
        for name in _ITEMS:
            if items := getattr(self, name):
                check_num_items(name, len(items))
        for name in _IDS:
            if token_ids := getattr(self, name):
                self._check_ids(name, token_ids)
        if self.seed is not None and not -_MAX_SEED <= self.seed < _MAX_SEED:
            raise RequestRefused(f"seed is {_shown(self.seed)}; it must fit in 64 bits", "seed")
        self._check_stops()
        self._check_bias()
        self._check_filter()
        self._check_logprob_token_ids()
        self._check_choices()
        self._check_structured_output()
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty != 1 or self.early_stopping:
            name = "early_stopping" if self.early_stopping else "length_penalty"
            raise RequestRefused(
                f"{name} is {getattr(self, name)}, which only beam search uses; omit it or set "
                "use_beam_search",
                name,
            )

    def with_max_tokens(self, max_tokens: int) -> "SamplingParams":
        """Returns the same parameters with this `max_tokens`. Only what depends on it is checked again."""
        made = object.__new__(SamplingParams)
        for name in self.__slots__:  # `copy` takes five times as long.
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "max_tokens", max_tokens)
        made._check_between("max_tokens", _RANGES["max_tokens"])
        made._check_min_tokens()
        return made

    @property
    def width(self) -> int:
        """Number of sequences that the engine runs in parallel for this request."""
        return self.n if self.best_of is None else self.best_of

    @property
    def width_param(self) -> str:
        """The field that sets `width`."""
        return "n" if self.best_of is None else "best_of"

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def num_choices(self) -> int:
        """Number of answers that the engine reports: all sampled answers, or the n best hypotheses of a beam search."""
        return self.n if self.use_beam_search else self.width

    def refuse_streaming(self) -> None:
        """Raises RequestRefused if the answers to return are known only when all are complete."""
        if self.num_choices > self.n:
            raise RequestRefused(
                f"best_of is {self.best_of} and n is {self.n}: the best answers are known only when "
                "all are complete, so they cannot be streamed; omit best_of or stream",
                "best_of",
            )

    def _check_structured_output(self) -> None:
        if self.structured_output is None:
            return
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise RequestRefused(
                    f"{name} and {self.structured_output.param} both limit the tokens of the answer, and together they "
                    f"may leave none; omit {name}",
                    name,
                )
        for name, neutral in (("min_tokens", 0), ("ignore_eos", False)):
            if getattr(self, name) != neutral:
                raise RequestRefused(
                    f"{name} is {getattr(self, name)}, but {self.structured_output.param} decides where the answer "
                    f"ends; omit {name}",
                    name,
                )

    def _check_beam_search(self) -> None:
        for name, beams in _NOT_SEARCHED.items():
            value = getattr(self, name)
            if value != beams.neutral:
                raise RequestRefused(
                    f"{name} is {value}; beam search does not sample and has no penalties; set it to "
                    f"{beams.neutral}",
                    name,
                )
        if self.stop:
            raise RequestRefused(
                "stop is set, but beam search does not support stop strings; use stop_token_ids",
                "stop",
            )

    def _check_choices(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestRefused(f"n is {_shown(self.n)}; it must be 1 to {MAX_CHOICES}", "n")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_CHOICES:
            raise RequestRefused(
                f"best_of is {_shown(self.best_of)}; it must be at least n ({self.n}) and at most {MAX_CHOICES}",
                "best_of",
            )

    def _check_between(self, name: str, limits: _Range) -> None:
        value = getattr(self, name)
        if value is not None and not limits.least <= value <= limits.most:  # NaN also fails
            raise RequestRefused(
                f"{name} is {_shown(value)}; it must be between {limits.least} and {limits.most}{limits.remark}",
                name,
            )

    def _check_stops(self) -> None:
        if any(not text for text in self.stop):
            raise RequestRefused(
                "stop has an empty string; a stop string needs at least one character", "stop"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise RequestRefused(
                f"stop has a string of {longest} characters; a stop string has at most {MAX_STOP_CHARS}",
                "stop",
            )
        for index, text in enumerate(self.stop):
            refuse_surrogate(text, f"stop[{index}]", "stop")
        self._check_min_tokens()

    def _check_min_tokens(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestRefused(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens"
            )

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            if not 0 <= token <= _MAX_COUNT:
                raise RequestRefused(
                    f"logit_bias has token id {_shown(token)}; ids are between 0 and {_MAX_COUNT}",
                    "logit_bias",
                )
            if not -100 <= bias <= 100:
                raise RequestRefused(
                    f"logit_bias of token {token} is {bias}; it must be between -100 and 100", "logit_bias"
                )

    def _check_filter(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestRefused(
                "allowed_token_ids is empty; it needs at least one token, or omit it", "allowed_token_ids"
            )
        for tokens in self.bad_words:
            if not 1 <= len(tokens) <= MAX_BAD_WORD_TOKENS:
                raise RequestRefused(
                    f"bad_words has a sequence of {len(tokens)} tokens; it must have 1 to {MAX_BAD_WORD_TOKENS}",
                    "bad_words",
                )
            self._check_ids("bad_words", tokens)

    def _check_logprob_token_ids(self) -> None:
        if not self.logprob_token_ids:
            return
        name = "logprob_token_ids"
        if self.logprobs is None:
            raise RequestRefused(f"{name} is only allowed with logprobs; set logprobs", name)
        if self.use_beam_search:
            raise RequestRefused(f"{name} is not supported with beam search; omit it", name)

    def _check_ids(self, name: str, token_ids: tuple[int, ...]) -> None:
        outside = [token for token in token_ids if not 0 <= token <= _MAX_COUNT]
        if outside:
            raise RequestRefused(
                f"{name} has id {_shown(outside[0])}; ids are between 0 and {_MAX_COUNT}", name
            )


def _limited(kind: type[_Limit]) -> dict[str, _Limit]:
    """The fields of SamplingParams that are declared with a limit of this kind."""
    name = kind.__name__
    return {field.name: field.metadata[name] for field in fields(SamplingParams) if name in field.metadata}


_RANGES, _ITEMS, _NOT_SEARCHED = _limited(_Range), _limited(_Items), _limited(_Beams)
LISTED_FIELDS = tuple(_ITEMS)
_IDS = tuple(name for name, items in _ITEMS.items() if items.are_ids)
# Sampling parameters whose defaults beam search ignores, because it draws no tokens.
CHANCE_FIELDS = tuple(name for name, beams in _NOT_SEARCHED.items() if beams.is_chance)


def check_num_items(name: str, num_items: int) -> None:
    """Raises RequestRefused if a list or a mapping of SamplingParams would have too many items."""
    items = _ITEMS[name]
    if num_items > items.most:
        raise RequestRefused(
            f"{name} has {num_items} {items.unit}; at most {items.most} are accepted, so send fewer", name
        )


def _shown(value: float) -> str:
    """The number as text for an error message, shortened if it has thousands of digits."""
    too_long = isinstance(value, int) and value.bit_length() > 128
    return f"a number of {int(value).bit_length()} bits" if too_long else str(value)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed`. Choice 0 uses the request's own seed.

    A separate request with the returned seed gives the same tokens as the choice. The mixing function is SplitMix64
    (Steele et al., 2014).
    """
    if index == 0:
        return seed
    state = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1
