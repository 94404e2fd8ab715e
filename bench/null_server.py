"""`slora serve` with the null engine, and the plainest server that sends the same answers.

    python -m bench.null_server real|without-usage|without-ipc serve FLAGS
    python -m bench.null_server bare

real            the engine process is `bench.null_engine`; all else is as in `slora serve`
without-usage   the same, but the engine reports that nothing was used
without-ipc     the API process makes the tokens itself, in the form that the engine sends
bare            one Starlette route under uvicorn, which parses the body and streams chunks of the same size. It uses
                the HTTP parser and the event loop that `slora serve` uses, whatever else is installed.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from bench.null_engine import NULL_TOKEN
from slora.client import replica_group
from slora.client.client import RemoteEngine
from slora.core.request import EngineRequest, FinishReason, RequestTiming, RequestUsage, TokenDelta
from slora_api.cli.main import main
from slora_api.processes.supervisor import Child
from slora_api.serve import serve

_CHUNK = {
    "id": f"cmpl-{'0' * 32}",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "model",
    "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
    "usage": None,
}
_TIMING = RequestTiming(0.0, 0.0, False, 0.0, 0.0, 0.0, 0.0)


class NullClient(RemoteEngine):
    """Answers in this process. The engine process only sends its EngineInfo."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:  # type: ignore[override]
        for left in reversed(range(request.sampling.max_tokens)):
            await asyncio.sleep(0)
            if not left:
                self._on_usage(request.request_id, RequestUsage(), _TIMING)
            yield [TokenDelta((NULL_TOKEN,), None if left else FinishReason.LENGTH)]

    def acknowledge_usage(self, request_id: str) -> None:
        pass


def serve_with_null_engine(kind: str, arguments: list[str]) -> int:
    make_children = serve.engines_and_loader

    def replaced(*given: Any) -> list[Child]:
        loader, engine = make_children(*given)
        flags = ["--no-usage"] if kind != "real" else []
        return [loader, replace(engine, module="bench.null_engine", arguments=[*engine.arguments, *flags])]

    serve.engines_and_loader = replaced
    if kind == "without-ipc":
        replica_group.RemoteEngine = NullClient  # type: ignore[misc]
    return main(arguments)


async def _complete(request: Request) -> StreamingResponse:
    body = await request.json()
    chunk = b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n"
    last = json.dumps(
        {**_CHUNK, "choices": [], "usage": {"completion_tokens": body["max_tokens"]}}, separators=(",", ":")
    )

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0)
            yield chunk
        yield b"data: " + last.encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


def serve_bare() -> None:
    app = Starlette(routes=[Route("/v1/completions", _complete, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    # As the listener of `slora serve` does. Otherwise, each answer would wait 40 ms for the client's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(f"slora: listening on http://127.0.0.1:{listener.getsockname()[1]};", flush=True)
    print("slora: ready;", flush=True)
    config = uvicorn.Config(
        app, http="h11", loop="asyncio", log_level="warning", access_log=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        serve_bare()
    else:
        sys.exit(serve_with_null_engine(sys.argv[1], sys.argv[2:]))
