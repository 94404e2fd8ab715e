"""The added tokens of an adapter's tokenizer that the base's tokenizer lacks or has with other settings.

`read_extras` finds them in an upload and writes them into the adapter's generation config, where each request reads
them. A tokenizer with them shares the vocabulary of the base's tokenizer, so that it takes some KB of memory.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tokenizers import AddedToken as LibraryToken
from tokenizers import Tokenizer as FastTokenizer

from slora_kernels.layout import MAX_ADDED_ROWS

# The fields of the generation config: the tokens, and the number of rows behind those of the base model.
_TOKENS_FIELD, _ROWS_FIELD = "added_tokens", "added_rows"
MAX_ADDED_TOKENS = 1_024
MAX_ADDED_CHARS = 128
# Building the tokenizer holds the interpreter lock for a time that grows with the characters of all tokens.
MAX_TOTAL_CHARS = 16_384
_SETTINGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
# `uses` of an upload names this many added tokens.
_NUM_NAMED = 32


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that the tokenizer finds in a text before it splits the rest."""

    token_id: int
    content: str
    special: bool = False  # By default, decoding leaves the token out.
    normalized: bool = False  # The token is searched in the normalized text.
    lstrip: bool = False  # The token takes the white space before it.
    rstrip: bool = False
    single_word: bool = False  # The token is not found within a word.

    @property
    def settings(self) -> tuple[bool, ...]:
        return tuple(getattr(self, name) for name in _SETTINGS)

    @staticmethod
    def of(token_id: int, token: LibraryToken) -> "AddedToken":
        return AddedToken(token_id, token.content, *(bool(getattr(token, name)) for name in _SETTINGS))

    @staticmethod
    def from_fields(token_id: int, fields: Mapping[str, object]) -> "AddedToken | None":
        """Reads a token of tokenizer_config.json. Returns None if a field is missing or malformed."""
        content, settings = fields.get("content"), [fields.get(name) for name in _SETTINGS]
        if not isinstance(content, str) or not all(isinstance(value, bool) for value in settings):
            return None
        return AddedToken(token_id, content, *map(bool, settings))

    def to_plain(self) -> dict[str, object]:
        """The fields, without those that are false."""
        fields = asdict(self)
        return {name: value for name, value in fields.items() if name == "token_id" or value}

    def to_library(self) -> LibraryToken:
        return LibraryToken(
            self.content,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=self.normalized,
            special=self.special,
        )


def list_added_tokens(tokenizer: FastTokenizer) -> list[AddedToken]:
    """Returns the added tokens of a tokenizer, in the order of their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return [AddedToken.of(token_id, added[token_id]) for token_id in sorted(added)]


def describe_added(tokens: Sequence[AddedToken]) -> str:
    """Returns the line of the certificate for the added tokens."""
    named = ", ".join(f"{token.content!r} (id {token.token_id})" for token in tokens[:_NUM_NAMED])
    more = len(tokens) - _NUM_NAMED
    return f"added tokens {named}" + (f" and {more} more" if more > 0 else "")


def write_added(
    generation: Mapping[str, object], tokens: Sequence[AddedToken], num_rows: int
) -> dict[str, object]:
    """Returns the fields of a generation config with those that `read_added_tokens` and `read_added_rows` read."""
    fields = {name: value for name, value in generation.items() if name not in (_TOKENS_FIELD, _ROWS_FIELD)}
    if tokens:
        fields[_TOKENS_FIELD] = [token.to_plain() for token in tokens]
    if num_rows:
        fields[_ROWS_FIELD] = num_rows
    return fields


def read_added_rows(generation_config: str | None) -> int:
    """Returns how many rows the adapter's embedding and head have behind those of the base model."""
    if generation_config is None or _ROWS_FIELD not in generation_config:
        return 0
    num_rows = json.loads(generation_config).get(_ROWS_FIELD)
    return num_rows if type(num_rows) is int and 0 < num_rows <= MAX_ADDED_ROWS else 0


def read_added_tokens(generation_config: str | None) -> tuple[AddedToken, ...]:
    """Reads the tokens that `read_extras` has written into an adapter's generation config.

    Returns none if the field is not what `read_extras` writes, which earlier releases stored as it was uploaded.
    """
    if generation_config is None or _TOKENS_FIELD not in generation_config:
        return ()
    listed = json.loads(generation_config).get(_TOKENS_FIELD)
    if not isinstance(listed, list) or len(listed) > MAX_ADDED_TOKENS:
        return ()
    try:
        tokens = tuple(AddedToken(**fields) for fields in listed)
    except TypeError:
        return ()
    is_written = (
        all(map(_is_valid, tokens)) and sum(len(token.content) for token in tokens) <= MAX_TOTAL_CHARS
    )
    return tokens if is_written else ()


def _is_valid(token: AddedToken) -> bool:
    has_types = type(token.token_id) is int and isinstance(token.content, str)
    has_settings = all(isinstance(value, bool) for value in token.settings)
    return has_types and has_settings and 0 < len(token.content) <= MAX_ADDED_CHARS and token.token_id >= 0


def extend_tokenizer(base: FastTokenizer, tokens: Iterable[AddedToken]) -> FastTokenizer:
    """Returns a tokenizer that differs from `base` in its added tokens only, and shares its vocabulary.

    A token with the id of an added token of `base` replaces it. Raises ValueError if the tokenizers library, which
    chooses the ids of added tokens itself, does not give a token the id that it has.
    """
    extended = FastTokenizer(base.model)
    extended.normalizer = base.normalizer
    extended.pre_tokenizer = base.pre_tokenizer
    extended.post_processor = base.post_processor
    extended.decoder = base.decoder
    extended.encode_special_tokens = base.encode_special_tokens
    table = {token.token_id: token for token in [*list_added_tokens(base), *tokens]}
    # The library gives ids in order, and each call builds its search automata anew. So one call adds all tokens, and a
    # second marks the special ones, which keep their ids.
    ordered = [table[token_id] for token_id in sorted(table)]
    extended.add_tokens([token.to_library() for token in ordered])
    extended.add_special_tokens([token.to_library() for token in ordered if token.special])
    given = {token.token_id: token for token in list_added_tokens(extended)}
    wrong = next((token for token in table.values() if given.get(token.token_id) != token), None)
    if wrong is not None or len(given) != len(table):
        token = wrong or next(token for token in given.values() if token.token_id not in table)
        raise ValueError(
            f"token {token.token_id} of the adapter's tokenizer is {token.content!r:.80}, which the base's tokenizer "
            f"gets as id {extended.token_to_id(token.content)}: the ids of added tokens must follow those of the "
            "base's tokenizer without a gap, and each token must have one id"
        )
    return extended
