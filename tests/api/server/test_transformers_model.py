"""A model of transformers' own classes behind the whole platform. Processes without torch know its shape too."""

from pathlib import Path

import pytest

from tests.api.served import serving, write_adapter, write_base
from tests.api.server.test_server import greedy_tokens, ids, upload
from tests.support.oracle import Oracle


@pytest.mark.soak
def test_adapters_of_a_transformers_model_are_pushed_and_answer_as_peft_does(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "opt")
    adapter = write_adapter(tmp_path / "own", seed=3, model="opt", r=8)
    oracle = Oracle(tmp_path / "base", {"own": adapter})
    with serving(tmp_path / "base", tmp_path / "data") as server:
        server.wait_until_ready()
        key = server.make_key("acme", "own")
        answer = upload(server, key, "own", adapter)
        assert answer.status_code == 201, answer.text
        with server.sdk(key) as client:
            for model, judged in (("base", None), ("default", "own")):
                tokens = greedy_tokens(client, model, "hello")
                assert oracle.judge(ids("hello"), tokens, judged).equal
