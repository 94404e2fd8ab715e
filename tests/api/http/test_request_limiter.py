"""Which requests are admitted, and which errors the other requests get."""

from contextlib import ExitStack

import pytest

from slora_api.core.errors import BadRequest, ServerBusy, TenantBusy, describe_error
from slora_api.http.permit_pool import RequestLimiter
from tests.support.clock import Clock


def make_limiter(clock: Clock, requests: int = 4, uploads: int = 4) -> RequestLimiter:
    return RequestLimiter(max_requests=requests, max_uploads=uploads, clock=clock)


def serve(limiter: RequestLimiter, clock: Clock, tenant: str, seconds: float) -> None:
    with limiter.admit_generation(tenant, 1):
        clock.now += seconds


def refusal(limiter: RequestLimiter, tenant: str, num_answers: int = 1) -> TenantBusy | ServerBusy:
    with pytest.raises((TenantBusy, ServerBusy)) as caught, limiter.admit_generation(tenant, num_answers):
        pass
    assert isinstance(caught.value, TenantBusy | ServerBusy)
    return caught.value


def test_retry_after_of_a_full_server_follows_the_answers_of_all_tenants() -> None:
    clock = Clock(100.0)
    limiter = make_limiter(clock, requests=5)
    serve(limiter, clock, "one", 30)
    with (
        limiter.admit_generation("one", 3),
        limiter.admit_generation("two", 1),
        limiter.admit_generation("three", 1),
    ):
        error = refusal(limiter, "four", 2)
    # An answer holds each of the 5 permits for 30 s, so one permit is released every 6 s. The request needs two.
    assert isinstance(error, ServerBusy) and error.retry_after_s == 12
    answer = describe_error(error)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "12")


def test_two_tenants_with_slow_answers_leave_permits_to_a_third() -> None:
    """Born from a bug: two tenants with 256 answers each held all 512 places."""
    limiter = make_limiter(Clock(100.0), requests=512)
    with ExitStack() as stack:
        for tenant in ("one", "two"):
            with pytest.raises(TenantBusy) as caught:
                while True:
                    stack.enter_context(limiter.admit_generation(tenant, 8))
        assert limiter.num_generations == 392
        assert "accepts 512: 120 are free, and up to 128 are reserved for tenants that have none" in str(
            caught.value
        )
        with limiter.admit_generation("honest", 1), limiter.admit_generation("later", 1):
            pass


def test_a_request_over_the_total_capacity_is_a_bad_request() -> None:
    limiter = make_limiter(Clock(100.0), requests=8)
    with pytest.raises(BadRequest) as caught, limiter.admit_generation("t", 1, 7):
        pass
    assert "asks for 7 answers" in str(caught.value) and "at most 6 at once" in str(caught.value)
    assert caught.value.param == "n"
    with limiter.admit_generation("t", 6):
        pass


def test_uploads_have_permits_of_their_own() -> None:
    clock = Clock(100.0)
    limiter = make_limiter(clock, uploads=4)
    serve(limiter, clock, "t", 90)
    with limiter.admit_upload("t"):
        clock.now += 8
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limiter.admit_upload("one"))
        with pytest.raises(TenantBusy, match=r"the limit is 2 \(half of max_concurrent_uploads\)") as own:
            stack.enter_context(limiter.admit_upload("one"))
        stack.enter_context(limiter.admit_upload("two"))
        with pytest.raises(
            TenantBusy, match="accepts 4: 1 are free, and up to 2 are reserved for tenants that have none"
        ):
            stack.enter_context(limiter.admit_upload("two"))
        stack.enter_context(limiter.admit_upload("three"))
        with pytest.raises(ServerBusy) as full:
            stack.enter_context(limiter.admit_upload("four"))
    assert (own.value.retry_after_s, full.value.retry_after_s) == (4, 2)
