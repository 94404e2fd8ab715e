"""Messages between API and engine arrive unchanged."""

from dataclasses import make_dataclass, replace
from typing import Any

import pytest

from slora.core.engine_state import HistogramCounts, LoadPaces, PageCounts, Pin, ServedCounts
from slora.core.errors import (
    AdapterFetchFailed,
    ContextTooLong,
    DeadlineMissed,
    RequestFailed,
    RequestRefused,
    StepFailed,
)
from slora.core.messages import Add, Observe, Outputs, Reply, SetPins, digest_fields
from slora.core.request import (
    EngineRequest,
    FinishReason,
    RequestUsage,
    StepOutput,
    TenantShare,
    TokenDelta,
    WeightedAdapter,
    compose_adapters,
)
from slora.core.sampling_params import SamplingParams
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.version import AdapterVersion
from tests.api.scripted_engine import make_stats
from tests.support.engine_stack import over_the_wire

REQUEST = EngineRequest("r", "t", [1, 2], (), SamplingParams())
SUM = compose_adapters(
    WeightedAdapter(AdapterVersion("t", digest * 64), weight) for digest, weight in (("0", -0.25), ("1", 1.0))
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"share": TenantShare(2.5, 0.125, 0.5, -3), "priority": -1000, "deadline_s": 0.25},
        {"share": TenantShare(weight=3), "priority": 7, "deadline_s": 86_400},
        {"adapters": SUM, "account": "key"},
        {"sampling": SamplingParams(None, stop=("a", "b"), stop_token_ids=(3,), logprobs=2, seed=7)},
        {"sampling": SamplingParams(logprobs=0, logprob_token_ids=(7, 5))},
        {"sampling": SamplingParams(allowed_token_ids=(1, 2), bad_words=((3,), (4, 5)), logit_bias={6: 1.0})},
    ],
)
def test_a_request_arrives_with_all_of_its_fields(changes: dict[str, Any]) -> None:
    request = replace(REQUEST, **changes)
    assert over_the_wire(Add(request)) == Add(request)


def test_the_count_of_cached_tokens_comes_with_the_delta() -> None:
    output = StepOutput("r", TokenDelta((5,), FinishReason.LENGTH, num_cached=32))
    assert over_the_wire(Outputs([output.to_row("r")])).read() == [output]


@pytest.mark.parametrize(
    "error",
    [
        RequestRefused("no", "field", "code"),
        ContextTooLong("too long", "prompt"),
        AdapterFetchFailed("gone", "not_found"),
        RequestFailed("broke"),
        DeadlineMissed("late"),
        StepFailed("not its fault"),
    ],
)
def test_an_error_keeps_its_class_and_words(error: Exception) -> None:
    (output,) = over_the_wire(Outputs([StepOutput("1:r", error=error).to_row("r")])).read()
    arrived = output.error
    assert type(arrived) is type(error) and str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_pins_arrive_with_the_shares_of_their_tenants() -> None:
    pins = [
        Pin(
            AdapterVersion("t", "a" * 64), TenantShare(weight=2.0, min_share=0.1, max_share=0.5, priority=-3)
        ),
        Pin(AdapterVersion("u", "b" * 64)),
    ]
    assert over_the_wire(SetPins(pins)) == SetPins(pins)
    assert over_the_wire(SetPins([])) == SetPins([])


def test_numbers_arrive_by_name() -> None:
    stats = make_stats(
        loaded_adapters=(("t", "a"), ("t", "b")),
        waiting_adapters=(("t", "c"),),
        loads_by_cause={"a": 1},
        preemptions_by_kind={"b": 2},
        step_seconds=HistogramCounts((0.5, 1.0), (1, 2, 3), 1.5),
        tenants={"t": ServedCounts(1, 2, 3, 4, 5, 0.5)},
        adapters={"t/0": ServedCounts(6)},
        pooled_adapters=("t/0",),
        pages=PageCounts(1, 2, 3, 4),
        tenant_pages={"t": PageCounts(1, 2)},
        load_paces=LoadPaces(1e-10, {"file": 2e-10}),
        usage=RequestUsage(1, 2, 3, 4, 5.5),
        host_cache=CacheCounts(2, 30, 100, {"t": 20}, ("t/0",)),
    )
    assert Observe.read_result(over_the_wire(Reply(1, stats)).result) == stats


def test_two_ends_whose_classes_differ_in_one_field_have_different_protocols() -> None:
    """Frames are lists of fields, so the older end would read a field as another one."""

    def digest(*fields: tuple[str, Any]) -> str:
        held = make_dataclass("Params", fields)
        return digest_fields([make_dataclass("Sent", [("params", tuple[held | None, ...])])])

    same = digest(("seed", int), ("top_k", int))
    assert digest(("seed", int), ("top_k", int)) == same
    for fields in (("seed", int),), (("seed", int), ("top_p", int)), (("seed", int), ("top_k", float)):
        assert digest(*fields) != same, fields
