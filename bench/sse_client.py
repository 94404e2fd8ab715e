"""A client for streamed completions that costs little CPU time, because it shares the machine with what it measures.

It speaks as much HTTP/1.1 as our server does: a connection is kept for the next request once its answer has ended.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

__all__ = ["Answer", "SseClient"]

_LIMIT = 1 << 20


@dataclass(slots=True)
class Answer:
    """Times on `time.perf_counter`. chunks_at: when each chunk with text came. num_tokens: as the server counted them.

    error: the status or the message of an answer that failed.
    """

    sent_at: float
    chunks_at: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and bool(self.chunks_at)


class SseClient:
    """Sends any number of requests at a time, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self._place = parts.hostname, parts.port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @property
    def num_idle(self) -> int:
        """The open connections that no request uses."""
        return len(self._idle)

    async def __aenter__(self) -> "SseClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, writer in self._idle:
            writer.close()

    async def connect(self, count: int) -> None:
        """Opens connections before the clock starts."""
        self._idle += [await asyncio.open_connection(*self._place, limit=_LIMIT) for _ in range(count)]

    async def complete(self, key: str, body: dict[str, object], path: str = "/v1/completions") -> Answer:
        """Sends a request with `stream`, and reads its answer to the end."""
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        if not self._idle:
            await self.connect(1)
        reader, writer = self._idle.pop()
        answer = Answer(time.perf_counter())
        try:
            writer.write(head.encode() + content)
            if await self._read(reader, answer):
                self._idle.append((reader, writer))
            else:
                writer.close()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            writer.close()
        return answer

    async def _read(self, reader: asyncio.StreamReader, answer: Answer) -> bool:
        """Returns whether the connection can be used again."""
        status = (await reader.readline()).split(b" ")[1:2]
        while (await reader.readline()).strip():
            pass
        if status != [b"200"]:
            answer.error = f"status {b''.join(status).decode() or 'missing'}"
            return False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                # Read the empty line of the event, the end of its chunk, and the last chunk.
                while line and line != b"0\r\n":
                    line = await reader.readline()
                await reader.readline()
                return True
            self._note(line[6:], answer)
        answer.error = "the stream ended without [DONE]"
        return False

    def _note(self, data: bytes, answer: Answer) -> None:
        # Only the last chunk has no choices. The others are not parsed, which would take longer than all else here.
        if b'"choices":[]' in data:
            answer.num_tokens = json.loads(data)["usage"]["completion_tokens"]
        elif data.startswith(b'{"error"'):
            answer.error = json.loads(data)["error"]["message"]
        else:
            answer.chunks_at.append(time.perf_counter())
