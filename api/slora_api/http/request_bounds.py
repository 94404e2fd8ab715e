"""The bounds on the work that one request can cause, all in one place.

Each bound is checked before the work that it bounds. Bytes and JSON values are counted while the body arrives, items
before the body is validated, and characters before a text is tokenized. Tokens and log-probabilities are counted before
the engine sees the request. `docs/limits.md` lists the bounds, and GET /v1/limits shows the bounds of a running server.

This module does not depend on HTTP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slora.core.engine_state import EngineInfo
from slora.core.errors import ContextTooLong
from slora.core.request_check import check_embedded_tokens, find_answer_room
from slora.core.sampling_params import (
    LISTED_FIELDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    check_num_items,
)
from slora_api.core.errors import BadRequest
from slora_api.core.settings import Settings

# Limit of bodies other than uploads and generation. Parsing and validating such a body takes less than 5 ms.
MAX_SMALL_BODY_BYTES = 1 << 16
# Maximum number of fields of one JSON object. The schema reports every unknown field. Each report takes 3 microseconds.
_MAX_FIELDS = 128
# Maximum length of the name of a model, a user or the author of a message.
MAX_NAME_CHARS = 512
# Enough for one prompt of 131,072 token ids. Parsing that many values takes 8 to 15 ms.
COMPLETION_VALUES = (1 << 17) + (1 << 12)
_MAX_MESSAGES = 2048
_MAX_CONTENT_PARTS = 4096
# `JsonStructure` counts 4 values in a message and 3 in a content part, commas included.
CHAT_VALUES = 4 * _MAX_MESSAGES + 3 * _MAX_CONTENT_PARTS + (1 << 12)
# Bounds the memory: 1,048,576 token ids take 38 MB.
_MAX_REQUEST_TOKENS = 1 << 20
# Fields of a body that have an object as their value.
_NESTED_FIELDS = (
    "stream_options",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "text",
    "reasoning",
)
# Fields that may be lists of parts, in a message or an item.
_PART_FIELDS = ("content", "output", "summary")
# A log-probability takes 30 to 100 bytes of JSON and 1.5 microseconds to write.
_MAX_ANSWER_LOGPROBS = 1 << 18
_MAX_ECHO_CHARS = 1 << 22
# As in OpenAI's API.
_MAX_INPUTS = 2048
# Enough for 1,500 embeddings of 4,096 components in base64, or for 340 as JSON numbers. Writing the numbers takes a
# second.
MAX_EMBEDDING_BYTES = 1 << 25
# A float32 as JSON has at most 24 characters and a comma. Three bytes are four characters of base64.
_FLOAT_BYTES, _BASE64_BYTES = 25.0, 16 / 3
_MAX_TEMPLATE_KWARGS_CHARS = 1 << 14


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Limits that a JSON body must meet before it is parsed.

    values: number of strings, numbers, arrays and objects.
    members: number of fields of all objects. Names of fields take longer to read than values. A chat of 2,048 messages
    with names has 6,144 fields.
    bare_bytes: number of bytes outside strings.
    number_chars: length of a number in characters.
    max_model_len: the context, for the error of a prompt with too many values.
    """

    values: int
    members: int = 1 << 14
    bare_bytes: int = 1 << 20
    number_chars: int = 64
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The bounds of one server.

    prompt_chars: characters of one prompt or input, or of all messages of a chat together.
    prompt_tokens: tokens of all prompts or inputs together.
    inputs: texts to embed.
    embedding_bytes: bytes of all embeddings in the answer.
    adapters: adapters that one request may combine.
    answer_tokens: tokens of all choices of all prompts together, including echoed prompts.
    answer_logprobs: log-probabilities listed in the answer. For each token, the answer lists the token's own
    log-probability and those of the most probable tokens.
    echo_chars: characters of echoed prompts, counted once for each choice.
    template_kwargs_chars: characters of the JSON of `chat_template_kwargs`.
    """

    max_model_len: int
    body_bytes: int
    small_body_bytes: int
    upload_bytes: int
    completion_values: int
    chat_values: int
    prompts: int
    prompt_chars: int
    prompt_tokens: int
    inputs: int
    messages: int
    content_parts: int
    adapters: int
    name_chars: int
    stop_strings: int
    stop_chars: int
    stop_token_ids: int
    logit_bias: int
    allowed_token_ids: int
    logprob_token_ids: int
    bad_words: int
    bad_word_chars: int
    choices: int
    logprobs: int
    answer_tokens: int
    answer_logprobs: int
    echo_chars: int
    embedding_bytes: int
    template_kwargs_chars: int

    @staticmethod
    def of(settings: Settings, info: EngineInfo, longest_token_chars: int) -> "RequestBounds":
        """Derives the bounds from the settings, the engine and the tokenizer.

        longest_token_chars: characters of the tokenizer's longest token. A text with more characters than max_model_len
        times this number cannot fit. Worked example: 131,072 tokens of at most 16 characters are 2,097,152 characters.
        """
        request_tokens = max(_MAX_REQUEST_TOKENS, info.max_model_len)
        return RequestBounds(
            max_model_len=info.max_model_len,
            body_bytes=settings.max_body_bytes,
            small_body_bytes=min(MAX_SMALL_BODY_BYTES, settings.max_body_bytes),
            upload_bytes=settings.max_upload_bytes,
            completion_values=COMPLETION_VALUES,
            chat_values=CHAT_VALUES,
            prompts=min(settings.max_concurrent_requests, settings.max_concurrent_per_tenant),
            prompt_chars=min(info.max_model_len * longest_token_chars, settings.max_body_bytes),
            prompt_tokens=request_tokens,
            inputs=_MAX_INPUTS,
            messages=_MAX_MESSAGES,
            content_parts=_MAX_CONTENT_PARTS,
            adapters=info.max_composed_adapters,
            name_chars=MAX_NAME_CHARS,
            stop_strings=MAX_STOP_STRINGS,
            stop_chars=MAX_STOP_CHARS,
            stop_token_ids=MAX_STOP_TOKEN_IDS,
            logit_bias=MAX_LOGIT_BIAS,
            allowed_token_ids=MAX_ALLOWED_TOKEN_IDS,
            logprob_token_ids=MAX_LOGPROB_TOKEN_IDS,
            bad_words=MAX_BAD_WORDS,
            bad_word_chars=MAX_BAD_WORD_CHARS,
            choices=min(MAX_CHOICES, info.max_num_seqs),
            logprobs=MAX_LOGPROBS,
            answer_tokens=request_tokens,
            answer_logprobs=_MAX_ANSWER_LOGPROBS,
            echo_chars=_MAX_ECHO_CHARS,
            embedding_bytes=MAX_EMBEDDING_BYTES,
            template_kwargs_chars=_MAX_TEMPLATE_KWARGS_CHARS,
        )

    @property
    def chat_json(self) -> JsonBounds:
        return JsonBounds(self.chat_values, max_model_len=self.max_model_len)

    @property
    def completion_json(self) -> JsonBounds:
        return JsonBounds(self.completion_values, max_model_len=self.max_model_len)

    def check_counts(self, body: Mapping[str, Any]) -> None:
        """Checks the number of items of each list and object in a parsed body. Raises BadRequest or RequestRefused.

        Values of the wrong type are ignored here, because the schema refuses them.
        """
        _check_fields("The body", None, body)
        truncates = body.get("truncate_prompt_tokens") is not None
        self._check_prompts(body.get("prompt"), truncates=truncates)
        for name in ("input", "documents", "text_1", "text_2"):
            self._check_inputs(name, body.get(name), truncates=truncates)
        messages = body.get("messages")
        _check_count("messages", messages, "messages", self.messages, "Leave out the oldest messages.")
        self._check_adapters(body)
        for name in LISTED_FIELDS:
            # A bad word is up to two token sequences, so words have a limit of their own.
            if name != "bad_words" and isinstance(items := body.get(name), list | dict):
                check_num_items(name, len(items))
        _check_count("bad_words", body.get("bad_words"), "words", self.bad_words, "Send fewer words.")
        for name in _NESTED_FIELDS:
            _check_nested(f"`{name}`", name, body.get(name), "json_schema", "function", "format")
        _check_each("A tool", "tools", body.get("tools"))
        for name in ("messages", "input"):
            sent = body.get(name)
            # `input` may be a list of 130,000 token ids, so only the first item decides whether to look for objects.
            # The schema refuses lists that mix objects with other items.
            if isinstance(sent, list) and sent and isinstance(sent[0], dict):
                self._check_parts(name, [one for one in sent if isinstance(one, dict)])

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raises ContextTooLong for a text with so many characters that no tokenization of it fits into the context."""
        if num_chars > self.prompt_chars:
            raise ContextTooLong.of(
                self.max_model_len,
                f"`{param}` has {num_chars} characters; this server accepts at most {self.prompt_chars}. Shorten it.",
                param,
            )

    def check_decoded(self, num_chars: int) -> None:
        """Raises BadRequest if decoded token ids give too long a text. num_chars: characters of that text."""
        if num_chars > self.prompt_chars:
            raise BadRequest(
                f"The text of `tokens` has {num_chars} characters; this server returns at most {self.prompt_chars}. "
                "Send fewer tokens.",
                "tokens",
            )

    def check_prompt_tokens(self, num_tokens: int, param: str = "prompt", noun: str = "prompt") -> None:
        """Raises BadRequest for too many tokens. num_tokens: tokens of all prompts, inputs to embed, or pairs of texts,
        together. noun: which of these the field holds.
        """
        if num_tokens > self.prompt_tokens:
            raise BadRequest(
                f"`{param}` has {num_tokens} tokens in all its {noun}s together; this server accepts at most "
                f"{self.prompt_tokens}. Send fewer {noun}s in one request.",
                param,
            )

    def check_embeddings(
        self, num_inputs: int, dimensions: int, *, is_base64: bool, param: str = "input"
    ) -> None:
        """Raises BadRequest for embeddings that are too large for one answer. param: the field of the inputs."""
        num_bytes = int(num_inputs * dimensions * (_BASE64_BYTES if is_base64 else _FLOAT_BYTES))
        if num_bytes > self.embedding_bytes:
            smaller = "" if is_base64 else ", `encoding_format: base64`"
            remedy = f", or ask for fewer `dimensions`{smaller}" if param == "input" else ""
            raise BadRequest(
                f"`{param}` has {num_inputs} inputs, whose embeddings of {dimensions} components take up to "
                f"{num_bytes} bytes; this server computes at most {self.embedding_bytes}. Send fewer inputs in one "
                f"request{remedy}.",
                param,
            )

    def check_echo(self, num_chars: int) -> None:
        """Raises BadRequest if `echo` would repeat too much text. num_chars: characters of all prompts. Each prompt
        counts once for each of its choices.
        """
        if num_chars > self.echo_chars:
            raise BadRequest(
                f"`echo` repeats each prompt once for each of its choices. That would be {num_chars} characters; this "
                f"server repeats at most {self.echo_chars}. Send fewer prompts, or a smaller `n`.",
                "echo",
            )

    def _check_adapters(self, body: Mapping[str, Any]) -> None:
        adapters = body.get("adapters")
        _check_count(
            "adapters", adapters, "adapters", self.adapters, "Name fewer, or upload their sum as one adapter."
        )
        for entry in adapters if isinstance(adapters, list) else ():
            _check_nested("An entry of `adapters`", "adapters", entry)

    def _check_prompts(self, prompt: Any, *, truncates: bool) -> None:
        if not isinstance(prompt, list) or not prompt:
            return
        if isinstance(prompt[0], str | list):
            _check_count("prompt", prompt, "prompts", self.prompts, "Send the others in separate requests.")
        elif not truncates:
            find_answer_room(len(prompt), self.max_model_len)

    def _check_inputs(self, name: str, given: Any, *, truncates: bool) -> None:
        """Checks texts or token ids to embed, or the items of a conversation."""
        if not isinstance(given, list) or not given:
            return
        if isinstance(given[0], str | list) or name == "documents":
            _check_count(name, given, "inputs", self.inputs, "Send the others in separate requests.")
        elif isinstance(given[0], int):
            if not truncates:
                check_embedded_tokens(len(given), self.max_model_len)
        else:
            _check_count(name, given, "items", self.messages, "Leave out the oldest items.")

    def _check_parts(self, param: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Checks the parts of each message. messages: the messages of a chat, or the items of `input`."""
        for message in messages:
            _check_fields("A message" if param == "messages" else "An item", param, message)
            _check_each("A tool call", param, message.get("tool_calls"))
        contents = [message.get(name) for message in messages for name in _PART_FIELDS]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if len(parts) > self.content_parts:
            raise BadRequest(
                f"`{param}` has {len(parts)} content parts in all; this server accepts at most "
                f"{self.content_parts}. Join the texts of each message into one part.",
                param,
            )


def _check_count(param: str, value: Any, unit: str, limit: int, remedy: str) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise BadRequest(
            f"`{param}` has {len(value)} {unit}; this server accepts at most {limit}. {remedy}", param
        )


def _check_each(name: str, param: str, items: Any) -> None:
    """Checks the number and names of the fields of each tool or tool call and of its function."""
    for item in items if isinstance(items, list) else ():
        _check_nested(name, param, item, "function")


def _check_nested(name: str, param: str, value: Any, *inner: str) -> None:
    """Checks the number and names of the fields of an object, and of the objects nested in its fields `inner`."""
    if isinstance(value, dict):
        _check_fields(name, param, value)
        for field in inner:
            _check_nested(f"The field `{field}` of {name[0].lower()}{name[1:]}", param, value.get(field))


def _check_fields(name: str, param: str | None, fields: Mapping[str, Any]) -> None:
    if len(fields) > _MAX_FIELDS:
        raise BadRequest(
            f"{name} has {len(fields)} fields; this server accepts at most {_MAX_FIELDS}. Omit those "
            "that the server does not know.",
            param,
        )
    for field in fields:
        try:
            field.encode()
        except UnicodeEncodeError:
            raise BadRequest(
                f"{name} has a field {field[:MAX_NAME_CHARS]!r}, whose name holds half of a surrogate pair. Remove it.",
                param,
            ) from None


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Finds the bounds of the requests to this server. info: raises Starting while there is no engine."""

    settings: Settings
    info: Callable[[], EngineInfo]
    longest_token_chars: int

    def find(self) -> RequestBounds:
        """Raises Starting while there is no engine."""
        return RequestBounds.of(self.settings, self.info(), self.longest_token_chars)
