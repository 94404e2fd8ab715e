import io
import tarfile
import time

import httpx
import pytest

from bench.attacks.answers import count, say, seconds_until
from bench.attacks.catalogue import ATTACKS
from bench.attacks.honest import Harvest
from bench.attacks.mixed import Outcome
from bench.attacks.templates import slow_template
from bench.attacks.uploads import long_name_tar, pax_tar
from slora.text.chat_template import compile_chat_template


def test_each_finding_has_an_attack() -> None:
    assert {attack.number for attack in ATTACKS} == set(range(1, 19))
    assert len({attack.title for attack in ATTACKS}) == len(ATTACKS)


def test_a_response_is_summarised_by_status_field_and_message() -> None:
    error = {"error": {"message": "too long", "param": "prompt"}}
    assert say(httpx.Response(400, json=error)) == "400 [prompt] too long"
    assert say(httpx.Response(200, content=b"abc")) == "200 (3 bytes)"
    assert say(httpx.Response(502, content=b"bad gateway")) == "502 bad gateway"
    assert count(["a", "b", "a"]) == "2 x a; 1 x b"


def test_an_event_that_does_not_happen_in_time_has_no_duration() -> None:
    assert seconds_until(lambda: False, 0.01, every_s=0.001) is None
    assert seconds_until(lambda: True, 1.0) == 0.0


def test_chained_long_names_end_in_a_recursion_or_an_error_of_the_library() -> None:
    file = io.BytesIO(long_name_tar(3000))
    with pytest.raises((RecursionError, tarfile.TarError)), tarfile.open(fileobj=file) as archive:
        archive.getmembers()


def test_a_pax_header_has_the_size_that_was_asked_for() -> None:
    assert len(pax_tar(1 << 16)) == pytest.approx(1 << 16, rel=0.1)


def test_a_slow_template_takes_cpu_time() -> None:
    template = compile_chat_template(slow_template(0.2))
    start = time.thread_time()
    template.render(messages=[{"content": "a"}])
    assert time.thread_time() - start > 0.05


def test_goodput_is_compared_by_share_of_what_was_offered() -> None:
    alone = Harvest(10.0, 100, 90, {}, 1.0, 1.0)
    attacked = Harvest(40.0, 400, 324, {"503": 2, "0": 1, "429": 5}, 1.0, 1.0)
    outcome = Outcome(alone, attacked, (1, 2, 1), {})
    assert outcome.goodput_ratio == pytest.approx(0.9)
    assert outcome.server_errors == 3
