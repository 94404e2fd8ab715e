"""Made and read traces, and the part of them that the busiest of several engines gets."""

from collections import Counter
from pathlib import Path

import pytest

from slora.errors import ConfigError
from slora.planning.workload import Adapters, Load, share_trace
from slora.simulation.trace_file import read_trace


def test_made_requests_have_the_wanted_rate_and_lengths_and_fit_a_sequence() -> None:
    trace = Load(4.0, 300, 100).make_trace(Adapters(10), 500, 2000)
    assert len(trace) == 500
    assert trace[-1].arrival_s == pytest.approx(125, rel=0.15)
    assert sum(one.prompt_tokens for one in trace) / 500 == pytest.approx(300, rel=0.02)
    assert max(one.prompt_tokens + one.output_tokens for one in trace) <= 2000


def test_the_busiest_engine_gets_at_least_its_part_and_whole_adapters() -> None:
    trace = Load(4.0, 30, 10).make_trace(Adapters(50, alpha=1.5), 400, 2000)
    shared = share_trace(trace, 4)
    assert len(shared) >= 100
    counts = Counter(one.adapter for one in trace)
    assert all(count == counts[adapter] for adapter, count in Counter(one.adapter for one in shared).items())


def test_requests_of_the_base_model_go_to_the_engines_in_turn() -> None:
    trace = Load(4.0, 30, 10).make_trace(Adapters(0), 400, 2000)
    assert len(share_trace(trace, 4)) == 100


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens,adapter\n7,20,3,a\n5,10,4,\n9,30,5,b\n"),
        (
            "trace.jsonl",
            '{"arrival_s": 7, "prompt_tokens": 20, "output_tokens": 3, "adapter": "a"}\n'
            '{"arrival_s": 5, "prompt_tokens": 10, "output_tokens": 4}\n\n'
            '{"arrival_s": 9, "prompt_tokens": 30, "output_tokens": 5, "adapter": "b"}\n',
        ),
    ],
)
def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    load = Load.of_trace(read_trace(path))
    assert (load.rate, load.prompt_tokens, load.output_tokens) == (0.5, 20, 4)
    assert [(one.arrival_s, one.adapter, one.prompt_tokens) for one in load.trace] == [
        (0.0, None, 10),
        (2.0, 0, 20),
        (4.0, 1, 30),
    ]
    assert len({one.tenant for one in load.trace}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace has no requests"),
        ("[1]\n", "line 1: is no JSON object"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "line 1: arrival_s is -1"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 1: prompt_tokens is 0"),
        ('{"arrival_s": 1, "prompt_tokens": 1}', "line 1: output_tokens is None"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_trace_without_duration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,1,1\n")
    with pytest.raises(ConfigError, match="must span some time"):
        Load.of_trace(read_trace(path))
