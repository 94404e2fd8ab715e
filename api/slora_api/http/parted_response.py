"""A JSON answer of known length that is sent in parts. The parts are not joined, so back-pressure applies to
each part.
"""

from collections.abc import Mapping, Sequence

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send


class PartedResponse(Response):
    """A response with a JSON body in parts. It subclasses Response because FastAPI requires it, but uses only the
    header handling of Response.
    """

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "content-length": str(sum(map(len, parts)))})
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for position, part in enumerate(self.parts):
            more = position < len(self.parts) - 1
            await send({"type": "http.response.body", "body": part, "more_body": more})
