"""Reads the optional files of an adapter: chat templates, sampling defaults, and the files of its tokenizer.

An adapter is served with the vocabulary of the base model, so a tokenizer that splits texts otherwise is refused. It
may have added tokens of its own (`AddedToken`) for which the base's embedding has rows: unused rows behind the
base's tokens, or special tokens of the base under another name. The special tokens that an adapter names, such as
`eos_token`, become variables of its chat template. Its own `eos_token` also ends answers.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken as LibraryToken
from tokenizers import Tokenizer as FastTokenizer

from slora_adapters.errors import Reason, abbreviate
from slora_adapters.peft.adapter import AdapterExtras, AdapterLimits
from slora_adapters.peft.strict_json import parse_object
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


TEMPLATE_NAME = "chat_template.jinja"
TEMPLATE_JSON_NAME = "chat_template.json"
TOOL_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"
TOKENIZER_NAME = "tokenizer_config.json"
VOCABULARY_NAME = "tokenizer.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
ADDED_TOKENS_NAME = "added_tokens.json"
GENERATION_NAME = "generation_config.json"
MODEL_CONFIG_NAME = "config.json"
# Multipart field of an upload -> the name of the file that peft and transformers write.
EXTRA_FIELDS: Mapping[str, str] = {
    "tokenizer_config": TOKENIZER_NAME,
    "chat_template": TEMPLATE_NAME,
    "generation_config": GENERATION_NAME,
    "tokenizer": VOCABULARY_NAME,
    "special_tokens_map": SPECIAL_TOKENS_NAME,
    "added_tokens": ADDED_TOKENS_NAME,
    "chat_template_json": TEMPLATE_JSON_NAME,
    "tool_template": TOOL_TEMPLATE_NAME,
    "model_labels": MODEL_CONFIG_NAME,
}
EXTRA_NAMES = tuple(EXTRA_FIELDS.values())

# Tokenizer configs list every added token of the base model. Llama 3's config is 50 KB; others are a few hundred KB.
MAX_TOKENIZER_BYTES = 4 << 20
# Gemma 3's tokenizer.json, the largest that is known, is 33 MB.
MAX_VOCABULARY_BYTES = 64 << 20

# The special tokens that chat templates may use by name.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Padding is not served, so a token that the adapter's tokenizer added for it is never needed.
_PADDING = "pad_token"
# A field of tokenizer_config.json: whether special tokens in a text are split like other text.
_SPLITTING = "split_special_tokens"
_REMEDY = (
    "train with tokens that the base model's tokenizer has, such as its reserved ones, or leave the tokenizer's files "
    "out of the upload if the training used the base model's tokenizer"
)
_SETTINGS_REMEDY = (
    f"upload the {VOCABULARY_NAME} of the adapter, which tells how the token is found in a text, or {_REMEDY}"
)


def max_extra_bytes(name: str) -> int:
    return MAX_VOCABULARY_BYTES if name == VOCABULARY_NAME else MAX_TOKENIZER_BYTES


def read_extras(
    members: Mapping[str, memoryview], limits: AdapterLimits, num_added: int = 0
) -> tuple[AdapterExtras, list[Reason]]:
    """Returns the extras among an adapter's files, and a reason for each error in these files.

    num_added: rows of the adapter's embedding and head behind those of the base model.
    """
    reasons: list[Reason] = []
    if limits.vocab_size is not None:
        limits = replace(limits, vocab_size=limits.vocab_size + num_added)
    config = _read_json(members, TOKENIZER_NAME, MAX_TOKENIZER_BYTES, reasons)
    special = _read_json(members, SPECIAL_TOKENS_NAME, MAX_TOKENIZER_BYTES, reasons)
    added = _read_json(members, ADDED_TOKENS_NAME, MAX_TOKENIZER_BYTES, reasons)
    generation = as_uploaded = _read_json(members, GENERATION_NAME, limits.max_text_bytes, reasons)
    template, tool_template, uses = _read_templates(members, config, limits, reasons)
    generation_text = _read_text(members, GENERATION_NAME, limits, reasons)
    if generation_text is not None:
        uses.append(GENERATION_NAME)
    base = _BaseTokenizer(limits.base_directory)
    named = _named_tokens(config, special) if base.exists else {}
    if base.exists and TOKENIZER_NAME in members:
        reasons += _refuse_other_split(config, base)
    listed = [*_list_tokens(config.get("added_tokens_decoder")), *_list_tokens(_by_id(added))]
    reasons += _refuse_ids_beyond(listed, limits)
    vocabulary = _read_vocabulary(members, base, limits, reasons)
    tokens = _AddedTokens.collect(config, special, vocabulary)
    own = tokens.find_own(listed, named, base, limits, reasons) if base.exists else ()
    if own:
        uses.append(describe_added(own))
    new_ids = {token.content: token.token_id for token in own}
    differing = {name: token for name, token in named.items() if token != base.named.get(name)}
    stop_ids: list[int] = []
    for name, token in differing.items():
        token_id = new_ids.get(token, base.token_id(token))
        if token_id is not None:
            uses.append(f"{name} {token!r} (id {token_id})")
            stop_ids += [token_id] if name == "eos_token" else []
        elif name == _PADDING:
            uses.append(f"not {name} {token!r}, because answers are not padded")
        else:
            reasons.append(Reason("special_token", f"{name} {_lacks(token)}; {_REMEDY}"))
    if not reasons:
        if stop_ids:
            generation = generation | {"eos_token_id": _add_stop_tokens(generation, stop_ids)}
        written = write_added(generation, own, num_added)
        generation_text = generation_text if written == as_uploaded else json.dumps(written)
        if own and len(generation_text or "") > limits.max_text_bytes:
            what = f"the generation config with {len(own)} added tokens"
            reasons.append(_too_long(what, len(generation_text or ""), limits))
    template = _with_names(template, tool_template, differing, base)
    return AdapterExtras(template, generation_text, tuple(uses)), reasons


# Fields that `add_labels` writes.
LABEL_FIELDS = ("num_labels", "id2label", "problem_type")
# An answer repeats the name of a label for each of its inputs.
MAX_LABEL_CHARS = 512
_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def add_labels(
    extras: AdapterExtras, members: Mapping[str, memoryview], num_labels: int, limits: AdapterLimits
) -> tuple[AdapterExtras, list[Reason]]:
    """Adds the labels of an adapter's head to its generation config, as `num_labels`, `id2label` and `problem_type`.

    They come from the config.json of the trained model, if the upload has it. Without a head, these fields are removed.
    """
    reasons: list[Reason] = []
    generation = json.loads(extras.generation_config or "{}")
    kept = {name: value for name, value in generation.items() if name not in LABEL_FIELDS}
    if not num_labels:
        text = extras.generation_config if kept == generation else json.dumps(kept)
        return replace(extras, generation_config=text), reasons
    config = _read_json(members, MODEL_CONFIG_NAME, MAX_TOKENIZER_BYTES, reasons)
    fields: dict[str, object] = {"num_labels": num_labels}
    names, problem = config.get("id2label"), config.get("problem_type")
    if names is not None:
        wanted = [str(label) for label in range(num_labels)]
        if not isinstance(names, dict) or sorted(names) != sorted(wanted):
            message = f"{MODEL_CONFIG_NAME}: id2label must name the labels 0 to {num_labels - 1} of the adapter's head"
            reasons.append(Reason("labels", message))
        elif not all(isinstance(name, str) and _is_text(name) for name in names.values()):
            reasons.append(Reason("labels", f"{MODEL_CONFIG_NAME}: a label of id2label is not a text"))
        elif len(longest := max(names.values(), key=len)) > MAX_LABEL_CHARS:
            message = (
                f"{MODEL_CONFIG_NAME}: id2label has the label {abbreviate(longest)} of {len(longest)} characters; "
                f"accepted are at most {MAX_LABEL_CHARS}. Shorten it"
            )
            reasons.append(Reason("labels", message))
        else:
            fields["id2label"] = {label: names[label] for label in wanted}
    if problem is not None:
        if problem not in _PROBLEMS:
            message = f"{MODEL_CONFIG_NAME}: problem_type is {abbreviate(problem)}; accepted are {', '.join(_PROBLEMS)}"
            reasons.append(Reason("labels", message))
        else:
            fields["problem_type"] = problem
    text = json.dumps({**kept, **fields})
    if len(text) > limits.max_text_bytes:
        message = f"the labels take {len(text)} bytes; this server accepts at most {limits.max_text_bytes}"
        reasons.append(Reason("labels", message))
    uses = (*extras.uses, f"{MODEL_CONFIG_NAME} (labels)") if len(fields) > 1 else extras.uses
    return replace(extras, generation_config=text, uses=uses), reasons


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _BaseTokenizer:
    """The files of the base model's tokenizer. They are read when they are needed."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.exists = directory is not None and (directory / VOCABULARY_NAME).is_file()

    def read(self, name: str) -> bytes | None:
        path = None if self._directory is None else self._directory / name
        return path.read_bytes() if path is not None and path.is_file() else None

    def _read_object(self, name: str) -> dict[str, object]:
        raw = self.read(name)
        return {} if raw is None else dict(json.loads(raw))

    @cached_property
    def _config(self) -> dict[str, object]:
        return self._read_object(TOKENIZER_NAME)

    @cached_property
    def splits_special(self) -> bool:
        return bool(self._config.get(_SPLITTING))

    @cached_property
    def named(self) -> dict[str, str]:
        """The special tokens by name."""
        return _named_tokens(self._config, self._read_object(SPECIAL_TOKENS_NAME))

    @cached_property
    def _listed(self) -> dict[str, int]:
        """The added tokens of the small files, which list those of most tokenizers."""
        added = _by_id(self._read_object(ADDED_TOKENS_NAME))
        tables = (self._config.get("added_tokens_decoder"), added)
        return {token: token_id for table in tables for token_id, token in _list_tokens(table)}

    @cached_property
    def _vocabulary(self) -> FastTokenizer:
        return FastTokenizer.from_buffer(self.read(VOCABULARY_NAME) or b"")

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token; None if the tokenizer does not have the token."""
        if token in self._listed:
            return self._listed[token]
        found: int | None = self._vocabulary.token_to_id(token)
        return found

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self._mark({token.token_id: token for token in list_added_tokens(self._vocabulary)})

    def _mark(self, tokens: Mapping[int, AddedToken]) -> dict[int, AddedToken]:
        return _mark_named(tokens, self._config, self._read_object(SPECIAL_TOKENS_NAME))

    def has_other_settings(self, token: AddedToken) -> bool:
        """Whether the base's files have an added token without these settings. An ordinary token has none."""
        known = [self._added.get(token.token_id)]
        table = self._config.get("added_tokens_decoder")
        fields = table.get(str(token.token_id)) if isinstance(table, dict) else None
        in_config = AddedToken.from_fields(token.token_id, fields) if isinstance(fields, dict) else None
        if in_config is not None:
            known += self._mark({token.token_id: in_config}).values()
        return token not in known

    def content(self, token_id: int) -> str | None:
        """Returns the token with this id; None if the tokenizer has none."""
        listed = next((token for token, listed_id in self._listed.items() if listed_id == token_id), None)
        found: str | None = self._vocabulary.id_to_token(token_id)
        return found if listed is None else listed

    def is_spare(self, token_id: int) -> bool:
        """Whether this is an added token that never spells text, and that an adapter may therefore name otherwise."""
        token = self._added.get(token_id)
        return token is not None and token.special and token_id >= self._vocabulary.get_vocab_size(False)

    def find_other_split(self, other: FastTokenizer, own: Sequence[AddedToken]) -> str | None:
        """Returns a text around an added token that `other` splits otherwise than this tokenizer with these tokens
        does. None if there is none, and if the two split texts without these tokens differently anyway, because
        transformers changes the base's tokenizer when it loads it.
        """
        if digest_tokenizer(self._vocabulary) not in self.list_digests(other):
            return None
        try:
            extended = extend_tokenizer(self._vocabulary, own)
        except ValueError:
            # The server, which has the tokenizer as transformers loads it, refuses the adapter.
            return None
        for token in own:
            for text in (f"a {token.content} b\n{token.content}c", f"{token.content}{token.content} d"):
                if extended.encode(text).ids != other.encode(text).ids:
                    return text
        return next((text for text in _TEXTS if extended.encode(text).ids != other.encode(text).ids), None)

    def list_digests(self, other: FastTokenizer) -> Iterator[str]:
        """Yields the digest of a tokenizer, and the one without the added tokens that this tokenizer lacks."""
        yield digest_tokenizer(other)
        if self.exists:
            own = {token.content for token in list_added_tokens(other)}
            own -= {token.content for token in self._added.values()}
            if own:
                yield digest_tokenizer(other, own)

    @cached_property
    def templates(self) -> dict[str, str]:
        """The chat templates `default` and `tool_use`, those that exist."""
        found = _named_templates(self._config.get("chat_template"))
        for name, key in ((TEMPLATE_NAME, "default"), (TOOL_TEMPLATE_NAME, "tool_use")):
            raw = self.read(name)
            if raw is not None:
                found[key] = raw.decode()
        return found


def _read_templates(
    members: Mapping[str, memoryview],
    config: Mapping[str, object],
    limits: AdapterLimits,
    reasons: list[Reason],
) -> tuple[str | None, str | None, list[str]]:
    """Returns the default template, the template for requests with tools, and the files that have them."""
    tables = {
        TOKENIZER_NAME: _named_templates(config.get("chat_template")),
        TEMPLATE_JSON_NAME: _named_templates(
            _read_json(members, TEMPLATE_JSON_NAME, MAX_TOKENIZER_BYTES, reasons).get("chat_template")
        ),
    }
    found: dict[str, tuple[str, str]] = {}
    uses = []
    for source, table in tables.items():
        for key, text in table.items():
            if key not in ("default", "tool_use"):
                uses.append(f"not the template {key[:80]!r} of {source}, which no request can choose")
            elif len(text.encode()) > limits.max_text_bytes:
                reasons.append(_too_long(f"chat_template in {source}", len(text.encode()), limits))
            else:
                found[key] = text, f"{source} ({key})"
    for key, name in (("default", TEMPLATE_NAME), ("tool_use", TOOL_TEMPLATE_NAME)):
        own = _read_text(members, name, limits, reasons)
        if own is not None:
            found[key] = own, name
    # As in transformers, a file with the default template replaces all templates of the other files.
    if TEMPLATE_NAME in members and TOOL_TEMPLATE_NAME not in members and "tool_use" in found:
        uses.append(f"not {found.pop('tool_use')[1]}, which {TEMPLATE_NAME} replaces")
    texts = [found.get(key, (None, ""))[0] for key in ("default", "tool_use")]
    return texts[0], texts[1], [*(source for _, source in found.values()), *uses]


def _named_templates(value: object) -> dict[str, str]:
    """Returns the templates of a config by name. The field is a string, or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    items = value if isinstance(value, list) else []
    named = [(item.get("name"), item.get("template")) for item in items if isinstance(item, dict)]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def _with_names(
    template: str | None, tool_template: str | None, named: Mapping[str, str], base: _BaseTokenizer
) -> str | None:
    """Returns one template that chooses between the two by the variable `tools`, and that sets the names of special
    tokens. None if the base model's template serves as it is.
    """
    templates = base.templates
    if template is None and (tool_template is not None or _uses_any(named, *templates.values())):
        template = templates.get("default")
        tool_template = templates.get("tool_use") if tool_template is None else tool_template
    if tool_template is not None:
        other = "{{ raise_exception('it needs tools') }}" if template is None else template
        # The marks keep Jinja from removing spaces at the ends of the two templates.
        template = "".join(
            [
                *("{% if tools %}\n", tool_template.removesuffix("\n"), "{%+ else %}\n"),
                *(other.removesuffix("\n"), "{%+ endif %}"),
            ]
        )
    if template is None:
        return None
    text = template
    sets = [
        f"{{% set {name} = {json.dumps(token)} %}}\n"
        for name, token in named.items()
        if _uses_any([name], text)
    ]
    return "".join(sets) + template


def _uses_any(names: Iterable[str], *templates: str) -> bool:
    return any(name in template for name in names for template in templates)


def _add_stop_tokens(generation: Mapping[str, object], stop_ids: Iterable[int]) -> list[object]:
    value = generation.get("eos_token_id")
    return list(
        dict.fromkeys([*(value if isinstance(value, list) else [] if value is None else [value]), *stop_ids])
    )


@dataclass(frozen=True, slots=True)
class _AddedTokens:
    """The added tokens of an adapter's tokenizer, by id.

    vocabulary: tokenizer.json, if it is not the base's file.
    """

    tokens: Mapping[int, AddedToken]
    vocabulary: FastTokenizer | None
    contradiction: str | None  # Two files that give a token different settings.

    @staticmethod
    def collect(
        config: Mapping[str, object], special: Mapping[str, object], vocabulary: FastTokenizer | None
    ) -> "_AddedTokens":
        tokens = {} if vocabulary is None else {one.token_id: one for one in list_added_tokens(vocabulary)}
        contradiction = None
        table = config.get("added_tokens_decoder")
        for token_id, _ in _list_tokens(table):
            fields = table[str(token_id)] if isinstance(table, dict) else None
            token = AddedToken.from_fields(token_id, fields) if isinstance(fields, dict) else None
            if token is not None and tokens.setdefault(token_id, token) != token:
                contradiction = f"token {token_id}, {token.content!r:.80}"
        return _AddedTokens(_mark_named(tokens, config, special), vocabulary, contradiction)

    def find_own(
        self,
        listed: Iterable[tuple[int, str]],
        names: Mapping[str, str],
        base: "_BaseTokenizer",
        limits: AdapterLimits,
        reasons: list[Reason],
    ) -> tuple[AddedToken, ...]:
        """Returns the tokens that the base's tokenizer lacks or has with other settings, in the order of their ids.

        listed: tokens by id of the small files. names: the special tokens by name.
        """
        size = limits.vocab_size
        contents = {token_id: token.content for token_id, token in self.tokens.items()}
        own: list[AddedToken] = []
        for token_id, content in dict.fromkeys([*contents.items(), *listed]):
            token = self.tokens.get(token_id)
            known = base.token_id(content)
            if known == token_id and (token is None or token.content == content):
                if token is not None and base.has_other_settings(token):
                    own.append(token)
            elif size is None or token_id < size:
                is_padding = content == names.get(_PADDING) and token is None
                reason = None if is_padding else self._refuse(token_id, content, token, base)
                if reason is not None:
                    reasons.append(Reason("added_tokens", reason))
                elif token is not None:
                    own.append(token)
        own.sort(key=lambda token: token.token_id)
        if own:
            reasons += self._check(own, base)
        return tuple(own)

    def _refuse(
        self, token_id: int, content: str, token: AddedToken | None, base: "_BaseTokenizer"
    ) -> str | None:
        """Returns why the adapter can't have this token, which the base's tokenizer lacks or has under another id."""
        what = f"token {token_id} of the adapter's tokenizer is {content!r:.80}, which"
        known = base.token_id(content)
        if token is not None and token.content != content:
            return f"{what} another file of it names {token.content!r:.80}; save the tokenizer again"
        if known is not None:
            return f"{what} is id {known} in the base's tokenizer; {_REMEDY}"
        if token is None:
            return f"{what} the base model's tokenizer does not have; {_SETTINGS_REMEDY}"
        if not 0 < len(content) <= MAX_ADDED_CHARS or not _is_text(content):
            return (
                f"{what} has {len(content)} characters; an added token has 1 to {MAX_ADDED_CHARS}; shorten it"
            )
        replaced = base.content(token_id)
        if replaced is not None and not base.is_spare(token_id):
            return (
                f"{what} takes the place of {replaced!r:.80} in the base's tokenizer; only special tokens behind the "
                f"base's vocabulary can have another name; {_REMEDY}"
            )
        return None

    def _check(self, own: Sequence[AddedToken], base: "_BaseTokenizer") -> Iterable[Reason]:
        if len(own) > MAX_ADDED_TOKENS:
            yield Reason(
                "added_tokens",
                f"the adapter's tokenizer has {len(own)} added tokens that differ from the base's; accepted are at "
                f"most {MAX_ADDED_TOKENS}; {_REMEDY}",
            )
        elif (num_chars := sum(len(token.content) for token in own)) > MAX_TOTAL_CHARS:
            yield Reason(
                "added_tokens",
                f"the {len(own)} added tokens of the adapter's tokenizer that differ from the base's have {num_chars} "
                f"characters in all; accepted are at most {MAX_TOTAL_CHARS}; shorten them, or {_REMEDY}",
            )
        elif self.contradiction is not None:
            yield Reason(
                "added_tokens",
                f"{VOCABULARY_NAME} and {TOKENIZER_NAME} of the adapter have {self.contradiction} with different "
                "settings; save the tokenizer again",
            )
        elif (
            self.vocabulary is not None and (text := base.find_other_split(self.vocabulary, own)) is not None
        ):
            yield Reason(
                "tokenizer_differs",
                f"{VOCABULARY_NAME} splits {text!r:.120} into other tokens than the base model's tokenizer does with "
                f"the adapter's added tokens; {_REMEDY}",
            )


def _refuse_other_split(config: Mapping[str, object], base: _BaseTokenizer) -> Iterable[Reason]:
    splits = bool(config.get(_SPLITTING))
    if splits != base.splits_special:
        yield Reason(
            "tokenizer_differs",
            f"{TOKENIZER_NAME} has {_SPLITTING}: {str(splits).lower()}, and the base model's tokenizer has "
            f"{str(base.splits_special).lower()}, so the two split special tokens in texts differently; train with the "
            f"base's setting, or set {_SPLITTING} to it if the texts of the training had no special tokens",
        )


def _mark_named(
    tokens: Mapping[int, AddedToken], config: Mapping[str, object], special: Mapping[str, object]
) -> dict[int, AddedToken]:
    """Marks the tokens as special that the files name, as transformers 5 does when it loads a tokenizer.

    It reads special_tokens_map.json (`special`) only if tokenizer_config.json has no table of added tokens, and marks
    only tokens of that table if there is one. A token in a list of special tokens stays as the tokenizer has it.
    """
    table = config.get("added_tokens_decoder")
    if table is None:
        named = {*_list_named(config, without=special), *_list_named(special)}
    else:
        named = {*_list_named(config)} & {content for _, content in _list_tokens(table)}
    return {
        token_id: replace(token, special=token.special or token.content in named)
        for token_id, token in tokens.items()
    }


# Each may also be a list in a file.
_TABLES_OF_NAMES = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


def _list_named(config: Mapping[str, object], without: Collection[str] = ()) -> Iterator[str]:
    """Yields the tokens of fields such as `eos_token` or `image_token`, except `without`, and those of tables of such
    fields.
    """
    for name, value in config.items():
        if name in _TABLES_OF_NAMES:
            items = [*value.values()] if isinstance(value, dict) else []
        else:
            items = [value] if name.endswith("_token") and name not in without else []
        for item in items:
            content = _content(item)
            if content is not None:
                yield content


def _read_vocabulary(
    members: Mapping[str, memoryview], base: _BaseTokenizer, limits: AdapterLimits, reasons: list[Reason]
) -> FastTokenizer | None:
    """Compares tokenizer.json with the base's. Returns the tokenizer of a file that is not the same."""
    raw = members.get(VOCABULARY_NAME)
    if raw is None:
        return None
    if len(raw) > MAX_VOCABULARY_BYTES:
        message = f"{VOCABULARY_NAME} takes {len(raw)} bytes; at most {MAX_VOCABULARY_BYTES} are accepted"
        reasons.append(Reason("extra_too_long", message))
        return None
    content = bytes(raw)
    if not limits.tokenizer_digests or content == base.read(VOCABULARY_NAME):
        return None
    try:
        tokenizer = FastTokenizer.from_buffer(content)
    except Exception as error:  # For any damage, the library raises bare Exception.
        reasons.append(Reason("extra_malformed", f"{VOCABULARY_NAME} is not a tokenizer: {str(error)[:300]}"))
        return None
    if not any(digest in limits.tokenizer_digests for digest in base.list_digests(tokenizer)):
        message = (
            f"{VOCABULARY_NAME} splits texts into other tokens than the base model's tokenizer; {_REMEDY}"
        )
        reasons.append(Reason("tokenizer_differs", message))
    added = tokenizer.get_added_tokens_decoder()
    reasons += _refuse_ids_beyond([(token_id, token.content) for token_id, token in added.items()], limits)
    return tokenizer


def _named_tokens(*configs: Mapping[str, object]) -> dict[str, str]:
    """Returns the special tokens by name. The first config that has a name is used."""
    named = {}
    for name in _SPECIAL_NAMES:
        token = next((text for config in configs if (text := _content(config.get(name))) is not None), None)
        if token is not None:
            named[name] = token
    return named


def _content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _by_id(added: Mapping[str, object]) -> dict[str, object]:
    return {str(number): token for token, number in added.items()}


def _list_tokens(table: object) -> Iterator[tuple[int, str]]:
    """Yields id and text of the tokens in a table by id."""
    for key, value in table.items() if isinstance(table, dict) else ():
        content, text = _content(value), str(key)
        if text.isascii() and text.isdecimal() and len(text) < 12:
            yield int(text), content or ""


def _refuse_ids_beyond(listed: Iterable[tuple[int, str]], limits: AdapterLimits) -> Iterable[Reason]:
    """Refuses token ids beyond the base model's vocabulary."""
    size = limits.vocab_size
    beyond = [] if size is None else [token_id for token_id, _ in listed if token_id >= size]
    if beyond:
        yield Reason(
            "added_tokens",
            f"the adapter's tokenizer adds {len(beyond)} tokens (id {beyond[0]}) beyond the base's "
            f"vocabulary of {size}; serve the base model with a resized vocabulary and this tokenizer, or leave the "
            "tokenizer out if the texts do not use them",
        )


def _lacks(token: str) -> str:
    return f"is {token!r:.80}, which the base model's tokenizer does not have"


def _read_json(
    members: Mapping[str, memoryview], name: str, max_bytes: int, reasons: list[Reason]
) -> dict[str, object]:
    if name not in members:
        return {}
    try:
        return parse_object(members[name], source=name, max_bytes=max_bytes)
    except ValueError as error:
        reasons.append(Reason("extra_malformed", str(error)))
        return {}


def _read_text(
    members: Mapping[str, memoryview], name: str, limits: AdapterLimits, reasons: list[Reason]
) -> str | None:
    raw = members.get(name)
    if raw is None:
        return None
    if len(raw) > limits.max_text_bytes:
        reasons.append(_too_long(name, len(raw), limits))
        return None
    try:
        return bytes(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        reasons.append(
            Reason("extra_malformed", f"{name} is not UTF-8 text: {error.reason} at byte {error.start}")
        )
        return None


def _too_long(what: str, num_bytes: int, limits: AdapterLimits) -> Reason:
    return Reason(
        "extra_too_long",
        f"{what} takes {num_bytes} bytes; this server accepts at most {limits.max_text_bytes}",
    )


# transformers may rewrite a tokenizer when it saves it, so equal tokenizers can have different files. They are compared
# by the tokens of texts that exercise every step, and by a sample of the vocabulary.
_NUM_SAMPLED = 997
_TEXTS = (
    "",
    " ",
    "   three  two one ",
    "\n\n\tdef f(x):\n        return x**2  # comment\r\n",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they've said: \"don't!\" (it's 3.14159, 1,234,567 or 0x7F)",
    "ÀÉÎõü e\u0301 \u212b ﬁ ½ ß İ",
    "日本語のテキスト 한국어 中文 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧 🎉 \u200b\ufeff\u00a0 \U0001d518",
    "CamelCase snake_case https://example.org/a?b=c#d user@example.org",
    '{"key": ["value", null, true, -1.5e-7]} <tag attr="x"/> $\\frac{a}{b}$',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 99999999999999999999",
)


def digest_tokenizer(tokenizer: FastTokenizer, without: Collection[str] = ()) -> str:
    """Returns a digest that is equal for tokenizers that split texts into the same tokens. Of added tokens, those that
    occur in the texts of the comparison are part of it.

    without: the texts of added tokens that are left out.
    """
    if without:
        fields = json.loads(tokenizer.to_str())
        fields["added_tokens"] = [
            token for token in fields["added_tokens"] if token["content"] not in without
        ]
        tokenizer = FastTokenizer.from_str(json.dumps(fields))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    hashed = hashlib.sha256()
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    for token_id in range(0, size, max(1, size // _NUM_SAMPLED)):
        hashed.update(f"{token_id} {tokenizer.id_to_token(token_id)}\n".encode())
    for text in _TEXTS:
        for add_special_tokens in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            hashed.update(f"{ids}\n".encode())
    return hashed.hexdigest()
