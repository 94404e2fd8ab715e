"""Random uploads to a real server. `tests/api/fuzz/watched_server.py` lists the properties that must hold."""

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.api.adapters.hostile_uploads import FIELDS
from tests.api.conftest import Kit
from tests.api.fuzz.uploads import CONFIG, WEIGHTS, Upload, uploads
from tests.api.fuzz.watched_server import WatchedServer, explain_answer

# A separate process inspects each upload, and its start takes half a second.
_QUICK, _SOAK = 4, 1_000
_UNHEALTHY = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
_CHAT = {"model": "fuzzed", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
_FORM = {"Content-Type": "multipart/form-data; boundary=b"}


# Hypothesis prints the failing example, which may be long.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_no_upload_breaks_the_server(watched: WatchedServer, kit: Kit, soak: bool) -> None:
    """An accepted upload answers a chat, or the chat is refused for a reason in the request."""
    config, weights = (kit.small / CONFIG).read_bytes(), (kit.small / WEIGHTS).read_bytes()

    with watched.client() as client:

        def post(upload: Upload) -> httpx.Response:
            if upload.raw is not None:
                return client.post("/v1/adapters", content=upload.raw, headers=_FORM)
            files = [(field, (name, raw)) for field, name, raw in upload.parts]
            return client.post("/v1/adapters", data={"name": "fuzzed"}, files=files)

        def judge(answer: httpx.Response, sent: object) -> None:
            wrong = explain_answer(answer.status_code, answer.content, answer.headers.get("content-type", ""))
            assert wrong is None, f"{sent}: {wrong}"

        def send(upload: Upload) -> None:
            uploaded = watched.send(upload, lambda: post(upload))
            judge(uploaded, upload)
            if uploaded.status_code == 201:
                judge(watched.send(upload, lambda: client.post("/v1/chat/completions", json=_CHAT)), upload)

        def fuzz(num_cases: int) -> None:
            profile = settings(max_examples=num_cases, suppress_health_check=_UNHEALTHY, deadline=None)
            profile(given(uploads(config, weights))(send))()

        fuzz(1)
        watched.begin()
        fuzz(_SOAK if soak else _QUICK)
        watched.check()


def test_a_template_with_a_constant_of_12_mb_uses_no_memory_and_blocks_no_renderer(
    watched: WatchedServer, kit: Kit
) -> None:
    files = {FIELDS[file]: (file, (kit.small / file).read_bytes()) for file in (CONFIG, WEIGHTS)}
    files["chat_template"] = ("chat_template.jinja", b"{{ 'ab' * 6000000 }}")
    with watched.client() as client:
        client.post("/v1/adapters", data={"name": "folded"}, files=files).raise_for_status()
        answer = client.post("/v1/chat/completions", json=_CHAT | {"model": "folded"})
    assert answer.status_code == 400 and "template" in answer.json()["error"]["message"]
