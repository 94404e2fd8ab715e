"""The number of names in the metrics is bounded, and no counter of a listed name ever shrinks."""

from hypothesis import given
from hypothesis import strategies as st

from slora.core.engine_state import ServedCounts
from slora.core.request import EngineRequest, RequestTiming, RequestUsage, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.scheduler.served_counts import OTHERS, ServedRequests
from slora_adapters.version import AdapterVersion

USAGE = RequestUsage(5, 3, 2)


def ask(tenant: str, digest: str | None = None, *, is_background: bool = False) -> EngineRequest:
    version = None if digest is None else AdapterVersion(tenant, digest)
    params = SamplingParams()
    return EngineRequest("r", tenant, [1], single_adapter(version), params, is_background=is_background)


def at(seconds: float, *, is_cold: bool = False) -> RequestTiming:
    return RequestTiming(seconds - 4, 1.0, is_cold, seconds - 1, seconds - 1, seconds, seconds)


def test_requests_are_counted_by_tenant_and_by_adapter() -> None:
    served = ServedRequests(4)
    served.add(ask("a", "0" * 64), USAGE, at(10, is_cold=True))
    served.add(ask("a"), USAGE, at(11))
    served.add(ask("b", is_background=True), USAGE, at(12, is_cold=True))
    both = ServedCounts(2, 10, 6, 4, 1, 4.0)
    # A background request may wait for hours, so only its tokens count.
    assert served.tenants == {"a": both, "b": ServedCounts(0, 5, 3, 2), OTHERS: ServedCounts()}
    assert served.adapters == {"a/" + "0" * 12: ServedCounts(1, 5, 3, 2, 1, 2.0), OTHERS: ServedCounts()}


def test_a_tenant_that_becomes_much_busier_takes_the_place_of_an_idle_one() -> None:
    served = ServedRequests(2)
    for tenant in ("a", "b", "c", "c", "other"):
        served.add(ask(tenant), USAGE, at(10))
    assert served.tenants.keys() == {"a", "b", OTHERS} and served.tenants[OTHERS].requests == 3
    served.add(ask("c"), USAGE, at(200))
    assert served.tenants.keys() == {"b", "c", OTHERS}
    assert served.tenants["c"] == ServedCounts(), "what it did before was counted with the others"
    served.add(ask("c"), USAGE, at(201))
    assert (served.tenants["c"].requests, served.tenants[OTHERS].requests) == (1, 4)


@given(
    st.lists(st.tuples(st.sampled_from([*"abcdefgh", OTHERS]), st.integers(0, 200)), max_size=60),
    st.integers(0, 4),
)
def test_counters_are_few_and_never_shrink_while_they_are_listed(
    steps: list[tuple[str, int]], most: int
) -> None:
    served, now = ServedRequests(most), 10.0
    for tenant, seconds in steps:
        before = served.tenants
        now += seconds
        served.add(ask(tenant), USAGE, at(now))
        after = served.tenants
        assert len(after) <= most + 1 and len(after.keys() - before.keys()) <= 1
        kept = before.keys() & after.keys()
        assert all(after[name].requests >= before[name].requests for name in kept)
        new = sum(after[name].requests for name in after.keys() - kept)
        assert new + sum(after[name].requests - before[name].requests for name in kept) == 1
