"""Formats the answers of several models as the JSON of /v1/fanout: as one body, or as the events of a stream.

The answers of the models are JSON already, and are not parsed again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from slora_api.errors import ErrorObject
from slora_api.generation.answer_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from slora_api.generation.json_slices import encode_ascii
from slora_api.key_masking import mask_keys

__all__ = ["AnswerEnvelope", "FanoutEvent", "FanoutObject", "join_answers"]

# Headers that describe how an answer is carried over HTTP.
_OF_TRANSPORT = ("content-length", "content-type", "cache-control", "x-accel-buffering")
_EVENT, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"


class FanoutAnswer(TypedDict):
    """The answer of one model.

    index: the position in `models`. model: the name in the request.
    request_id: names this answer in the server's log. It is the id of the call, a hyphen and the index.
    status_code, headers, body: what /v1/chat/completions or /v1/completions answers to the same request.
    """

    index: int
    model: str
    request_id: str
    status_code: int
    headers: dict[str, str]
    body: ChatCompletion | Completion | ErrorObject


class FanoutObject(TypedDict):
    """The answers of all models. id: the call's `X-Request-Id`. answers: one for each of `models`, in order."""

    id: str
    object: Literal["fanout"]
    answers: list[FanoutAnswer]


class FanoutEvent(TypedDict):
    """One event of a stream.

    request_id, status_code, headers: in the first event of an answer.
    chunk: the data of one event of the answer's own stream, or its error.
    done: in the last event of an answer.
    """

    index: int
    model: str
    request_id: NotRequired[str]
    status_code: NotRequired[int]
    headers: NotRequired[dict[str, str]]
    chunk: NotRequired[ChatCompletionChunk | CompletionChunk | ErrorObject]
    done: NotRequired[Literal[True]]


class AnswerEnvelope:
    """Adds the model's index and name to the answer of one model. model: the name in the request."""

    def __init__(self, index: int, model: str, request_id: str) -> None:
        # An unknown model name may be an API key that was pasted into the wrong field.
        self._label = {"index": index, "model": mask_keys(model)}
        self._start = encode_ascii(self._label)[:-1].encode() + b","
        self._request_id = request_id

    def whole(self, status: int, headers: Mapping[str, str], body: Sequence[bytes]) -> list[bytes]:
        """Returns the JSON of the answer, as pieces to concatenate. body: the pieces of the model's own answer, which
        is JSON.
        """
        return [self._opening(status, headers)[:-1] + b',"body":', *body, b"}"]

    def opening(self, status: int, headers: Mapping[str, str]) -> bytes:
        """Returns the first event of the answer, with its status and headers."""
        return _EVENT + self._opening(status, headers) + _END

    def chunks(self, events: bytes) -> bytes:
        """Converts complete events of the answer's own stream to events of the fan-out."""
        found = [event.removeprefix(_EVENT) for event in events.split(_END)]
        return b"".join(self.chunk(data) for data in found if data not in (b"", _DONE))

    def chunk(self, data: bytes) -> bytes:
        """Returns one event. data: ASCII JSON."""
        return _EVENT + self._start + b'"chunk":' + data + b"}" + _END

    def closing(self) -> bytes:
        """Returns the last event of the answer."""
        return _EVENT + self._start + b'"done":true}' + _END

    def _opening(self, status: int, headers: Mapping[str, str]) -> bytes:
        shown = {name.lower(): value for name, value in headers.items() if name.lower() not in _OF_TRANSPORT}
        about = {"request_id": self._request_id, "status_code": status, "headers": shown}
        return encode_ascii(self._label | about).encode()


def join_answers(call_id: str, answers: Iterable[Sequence[bytes]]) -> list[bytes]:
    """Returns the JSON of a call, as pieces to concatenate. answers: the pieces of the JSON of each answer."""
    parts = [encode_ascii({"id": call_id, "object": "fanout"})[:-1].encode() + b',"answers":']
    mark = b"["
    for answer in answers:
        parts += [mark, *answer]
        mark = b","
    return [*parts, b"]}"]
