"""`slora top` reads the feed, and waits for a server that restarts."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from slora_api.cli.remote import CommandFailed
from slora_api.metrics.top_command import Interruption, follow_frames


def stream(*frames: str) -> httpx.Response:
    return httpx.Response(200, content="".join(f"data: {frame}\n\n" for frame in frames))


def refuse_connection() -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.fixture
def client_of() -> Iterator[Callable[..., httpx.Client]]:
    """Makes a client whose requests get the given answers, one after the other."""
    clients: list[httpx.Client] = []

    def make(*answers: Callable[[], httpx.Response]) -> httpx.Client:
        left = iter(answers)
        transport = httpx.MockTransport(lambda request: next(left)())
        clients.append(httpx.Client(transport=transport, base_url="http://server"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_after_a_restart_of_the_server_frames_go_on(client_of: Callable[..., httpx.Client]) -> None:
    client = client_of(
        lambda: stream('{"n": 1}', "null"),
        refuse_connection,
        lambda: httpx.Response(503),
        lambda: stream('{"n": 2}'),
    )
    pauses: list[float] = []
    frames = follow_frames(client, "/v1/live", pauses.append)
    found = [next(frames) for _ in range(6)]
    frames.close()
    assert found[:2] + found[5:] == [{"n": 1}, None, {"n": 2}]
    assert [str(one) for one in found[2:5]] == [
        "the server ended the connection; trying again",
        "no answer from the server: refused; trying again",
        "the server answers 503; trying again",
    ]
    assert all(isinstance(one, Interruption) for one in found[2:5]) and len(pauses) == 3


def test_a_server_that_never_answered_is_an_error(client_of: Callable[..., httpx.Client]) -> None:
    with pytest.raises(httpx.ConnectError):
        next(follow_frames(client_of(refuse_connection), "/v1/live"))


@pytest.mark.parametrize(
    "answer",
    [
        lambda: stream('{"error": {"message": "The key was revoked."}}'),
        lambda: httpx.Response(401, json={"error": {"message": "The key was revoked."}}),
    ],
)
def test_a_key_that_is_revoked_ends_it_with_the_reason(
    client_of: Callable[..., httpx.Client], answer: Callable[[], httpx.Response]
) -> None:
    frames = follow_frames(client_of(lambda: stream("null"), answer), "/v1/live", lambda _: None)
    assert next(frames) is None and isinstance(next(frames), Interruption)
    with pytest.raises(CommandFailed, match="The key was revoked"):
        next(frames)
