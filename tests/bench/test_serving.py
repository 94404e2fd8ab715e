"""The figures of the serving bench by hand, and small runs of its parts."""

import asyncio
import inspect
from pathlib import Path

import pytest

from bench.console import paint_tables, viewer_tables
from bench.live_platform import Setup
from bench.null_engine import NullEngine
from bench.serving import http_tables, layer_tables, trace_tables
from bench.serving_metrics import Limits, Served, jain_index, serving_row, tenant_rows
from bench.sse_client import Answer, SseClient
from bench.workload import ModelSize
from slora.engine.engine import Engine
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import CHARACTERS

_TINY = ModelSize(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=len(CHARACTERS) + 1
)
_SETUP = Setup(_TINY, flags=("--kernels", "torch"))


def served(
    tenant: int, due_at: float, chunks_at: list[float], *, sent_at: float, is_cold: bool = False
) -> Served:
    return Served(tenant, due_at, is_cold, Answer(sent_at, chunks_at, len(chunks_at)))


def test_the_figures_equal_those_by_hand() -> None:
    run = [
        served(0, 0.0, [1.0, 1.5, 2.0], sent_at=0.5, is_cold=True),
        served(1, 1.0, [1.1, 1.2], sent_at=1.0),
        Served(1, 2.0, False, Answer(2.0, error="status 503")),
    ]
    row = serving_row(run, 4.0, Limits(ttft_s=0.2, tpot_s=1.0))
    assert (row["requests"], row["failed"], row["requests/s"], row["tokens/s"]) == (3, 1, 0.5, 1.25)
    # Only the second request has its first token in 0.2 s.
    assert row["goodput/s"] == 0.25
    assert (row["cold TTFT p50 ms"], row["send lag p99 ms"]) == (500.0, 500.0)
    assert row["warm TTFT p50 ms"] == pytest.approx(100.0)
    # Gaps of 500, 500 and 100 ms; the time per token is 500 and 100 ms.
    assert (row["ITL p50 ms"], row["TPOT p50 ms"]) == (500.0, 500.0)
    # The tenants saw 3 tokens in 1.5 s and 2 tokens in 0.2 s.
    assert row["Jain"] == pytest.approx(jain_index([2.0, 10.0]))
    assert [(one["tenant"], one["requests"], one["failed"]) for one in tenant_rows(run)] == [
        (1, 2, 1),
        (0, 1, 0),
    ]


def test_jains_index_is_one_for_equal_shares_and_one_nth_for_a_monopoly() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0, 1.0, 4.0]) == pytest.approx(2 / 3)


def test_the_null_engine_has_the_methods_that_the_worker_calls() -> None:
    """Born from `step`, which got a parameter that the null engine lacked."""
    for name in ("add", "abort", "step", "pop_usage"):
        of_null, of_engine = (inspect.signature(getattr(kind, name)) for kind in (NullEngine, Engine))
        assert list(of_null.parameters) == list(of_engine.parameters), name


def test_the_client_reads_streams_one_after_another_on_one_connection(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"hello")])) as platform:
        key = platform.key("bench")

        async def ask() -> list[Answer]:
            async with SseClient(platform.url) as client:
                body: dict[str, object] = {"model": "base", "prompt": "a", "max_tokens": 5}
                answers = [await client.complete(key, body) for _ in range(2)]
                assert client.num_idle == 1
                return [*answers, await client.complete(key, {**body, "model": "missing"})]

        first, second, refused = asyncio.run(ask())
    for answer in (first, second):
        assert (answer.error, answer.num_tokens, len(answer.chunks_at)) == (None, 5, 5)
    assert refused.error == "status 404" and not refused.is_complete


@pytest.mark.soak
def test_every_part_prints_its_tables() -> None:
    rows, by_tenant = trace_tables(quick=True, setup=_SETUP).values()
    assert [row["failed"] for row in rows] == [0, 0, 0] and len(by_tenant) >= 3
    compared, bar = http_tables(quick=True, setup=_SETUP).values()
    assert [row["case"] for row in compared] == ["engine alone", "over HTTP", "over HTTP / engine alone"]
    assert [row["seen"] for row in bar] == [compared[-1]["median"]]
    layers, verdicts = layer_tables(quick=True, setup=_SETUP).values()
    assert len(layers) == 6 and all(row["chunks/s"] > 0 for row in layers)
    assert len({row["bar"] for row in verdicts}) == len(verdicts) == 3


@pytest.mark.soak
def test_the_bench_of_the_console_prints_its_tables() -> None:
    rounds, bar = viewer_tables(quick=True, setup=_SETUP).values()
    assert [row["case"] for row in rounds] == ["without viewers", "50 viewers", "with viewers / without"]
    assert [row["seen"] for row in bar] == [rounds[-1]["median"]]
    (paint,), verdicts = paint_tables(quick=True, setup=_SETUP).values()
    assert paint["first paint ms"] > 0 and paint["files KB"] > 50
    assert [row["wanted"] for row in verdicts] == ["<= 1000", "<= 300"]
