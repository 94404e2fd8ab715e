"""Admits requests: charges them to the quotas of their tenant and their key, and limits the answers in progress.

Before a request is admitted, it reserves the tokens of its prompt and of the longest answers that it may get. When the
engine has reported the use of the request, this use replaces the reservation. So quotas and the usage ledger count the
same tokens:

| how the request ends | requests | tokens |
|---|---|---|
| answered, or ended by its client or its deadline | 1 | computed prompt tokens and generated tokens |
| failed after a part was computed | 1 | the same |
| refused, or failed before anything was computed | 0 | 0 |

A long prompt is charged as a request before it is tokenized, and this charge is not refunded. Otherwise, a client could
make the server tokenize any number of long prompts, although its quota then refuses the requests.

When an account has no figures yet, its use of the day and of the month is read from the usage ledger: it is seeded.
Every `_COMPARE_S` seconds, accounts are compared with the ledger, because only the ledger has the usage of requests
whose API process was killed.

This module does not depend on HTTP.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from slora.core.errors import DeadlineMissed
from slora.core.request import RequestUsage
from slora_adapters.errors import StoreUnavailable
from slora_api.core.errors import ApiError, BadRequest, BudgetExhausted, RateLimited, TenantBusy
from slora_api.core.threads import control_thread
from slora_api.http.permit_pool import RequestLimiter
from slora_api.quotas.quota import Quota
from slora_api.quotas.quota_counters import (
    Charge,
    Obstacle,
    QuotaCounters,
    Refusal,
    Reservation,
    Subject,
    Use,
)
from slora_api.quotas.quota_store import QuotaStore
from slora_api.usage.usage_ledger import UsageLedger

logger = logging.getLogger(__name__)

_DAY_S = 86_400
_COMPARE_S = 30.0
# Reserving may fail again after seeding, for example if a new day has just begun.
_MAX_TRIES = 4
# An answer without max_tokens may use at most 1/4 of the smallest token limit, so that several requests fit into it.
_DEFAULT_PART = 4
# These errors are not failures of the server: the client hung up, or the deadline cannot be met.
_ENDED_BY_CLIENT = (asyncio.CancelledError, GeneratorExit, DeadlineMissed)
_BUDGETS = ("tokens_per_day", "tokens_per_month")


class QuotaMeter:
    """Makes the meter of each request.

    quota_store: the quotas of tenants and keys.
    limiter: limits the answers in progress of the whole server.
    count_refusal: called at each refusal, with the field of the exceeded limit.
    utc: Unix time.
    """

    def __init__(
        self,
        quota_store: QuotaStore,
        counters: QuotaCounters,
        history: UsageLedger,
        limiter: RequestLimiter,
        count_refusal: Callable[[str], None],
        utc: Callable[[], float] = time.time,
    ) -> None:
        self._quota_store = quota_store
        self.counters = counters
        self.limiter = limiter
        self.count_refusal = count_refusal
        self.utc = utc
        self._history = history
        # Account -> its subject, for subjects with a budget that made a reservation since the last comparison with the
        # history.
        self._budgeted: dict[str, Subject] = {}

    async def open(self, tenant: str, key_id: str, *, is_background: bool = False) -> "RequestMeter":
        """Returns the meter of one request. Raises StoreUnavailable.

        is_background: whether the request is a line of a batch. Lines use at most half of the limits per minute, so
        that interactive requests keep the other half. They do not count as answers in progress.
        """
        quotas = self._quota_store.find_cached(key_id)
        if quotas is None:
            quotas = await control_thread(self._quota_store.find, tenant, key_id)
        if is_background:
            halves = tuple(replace(one, quota=_background_quota(one.quota)) for one in quotas.subjects)
            return RequestMeter(self, tenant, halves, counts_answers=False)
        return RequestMeter(self, tenant, quotas.subjects)

    async def read(self, subject: Subject) -> Use:
        """Returns the present use of a subject. Raises StoreUnavailable."""
        if subject.quota.has_budget:
            await self._seed(subject)
        (use,) = await self.counters.read((subject,))
        return use

    async def reserve(self, subjects: tuple[Subject, ...], charge: Charge) -> Reservation | Refusal:
        """Reserves the charge in the counters. Accounts with a budget are first seeded from the history, if necessary.
        Raises StoreUnavailable.
        """
        for subject in subjects:
            if subject.quota.has_budget:
                self._budgeted[subject.account] = subject
        for _ in range(_MAX_TRIES):
            made = await self.counters.reserve(subjects, charge)
            if isinstance(made, Reservation | Refusal):
                return made
            for subject in made.subjects:
                await self._seed(subject)
        raise StoreUnavailable(f"the budget of tenant {subjects[0].tenant!r} could not be seeded")

    async def run(self) -> None:
        """Maintains the counters and compares budgets with the history, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.counters.run())
            group.create_task(self._compare())

    async def _compare(self) -> None:
        while True:
            await asyncio.sleep(_COMPARE_S)
            subjects, self._budgeted = self._budgeted, {}
            for subject in subjects.values():
                try:
                    await self._seed(subject)
                except StoreUnavailable as error:
                    logger.warning("budgets cannot be compared with the usage ledger now: %s", error)
                    break

    async def _seed(self, subject: Subject) -> None:
        date = datetime.fromtimestamp(self.utc(), UTC)
        starts = (
            date.replace(hour=0, minute=0, second=0, microsecond=0),
            date.replace(day=1, hour=0, minute=0, second=0, microsecond=0),
        )
        used = [
            await control_thread(
                self._history.used_tokens, subject.tenant, subject.key_id or None, start.timestamp()
            )
            for start in starts
        ]
        await self.counters.seed(subject, *used)


class RequestMeter:
    """Admits and charges one request. subjects: the tenant and the key whose quotas limit it. counts_answers: whether
    its answers count as answers in progress.
    """

    def __init__(
        self, quotas: QuotaMeter, tenant: str, subjects: tuple[Subject, ...], *, counts_answers: bool = True
    ) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._counts_answers = counts_answers
        self._subjects = subjects
        self._is_counted = False
        # The use of each subject, as last returned by the counters.
        self._uses: tuple[Use, ...] | None = None

    @property
    def most_answers(self) -> int | None:
        """The maximum number of answers in progress; None for no limit."""
        limits = [one.quota.concurrent_answers for one in self._subjects]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_adapters(self, count: int) -> None:
        """Raises BadRequest if the quota does not permit one request to combine `count` adapters."""
        for subject in self._subjects:
            limit = subject.quota.composed_adapters
            if limit is not None and count > limit:
                self._quotas.count_refusal("composed_adapters")
                raise BadRequest(
                    f"`adapters` combines {count} adapters; the limit of {_owner(subject)} is {limit} in one request "
                    "(composed_adapters). Name fewer, or ask the operator for a higher quota.",
                    "adapters",
                )

    def default_answer_tokens(self, prompt_tokens: int, num_answers: int) -> int | None:
        """Returns the limit of tokens for each answer if the client sent no max_tokens; None for no limit."""
        limits = [one.quota.least_tokens for one in self._subjects if one.quota.least_tokens is not None]
        if not limits:
            return None
        least = min(limits)
        return max(1, min(least // _DEFAULT_PART, least - prompt_tokens) // num_answers)

    async def count_request(self, least_tokens: int = 0, least_answers: int = 0) -> None:
        """Charges the request before its prompt is tokenized. Further calls charge nothing. Raises the errors of
        `hold`.

        least_tokens, least_answers: the minimum numbers of tokens and of answers in progress that the request needs.
        They are only checked against the limits, not charged.
        """
        if self._is_counted:
            return
        reservation = await self.reserve(Charge(least_tokens, 0), "prompt")
        obstacles = [
            Obstacle(subject, "concurrent_answers")
            for subject, use in zip(self._subjects, reservation.uses, strict=True)
            if (limit := subject.quota.concurrent_answers) is not None and use.answers + least_answers > limit
        ]
        is_refused = bool(obstacles) and self._counts_answers
        self.settle(reservation, 0, counts=not is_refused)
        if is_refused:
            charge = Charge(least_tokens, least_answers)
            raise self._refuse(Refusal(tuple(obstacles), reservation.uses), charge)
        self._is_counted = True

    def check_answers(self, num_prompts: int, answers_each: int = 1, param: str = "n") -> None:
        """Checks that the server has room for the answers, before the prompts are tokenized. Raises the errors of
        `hold`.

        param: the field that asks for several answers to each prompt.
        """
        self._quotas.limiter.check_generation(self._tenant, num_prompts, answers_each, param)

    def hold(
        self,
        prompt_tokens: int,
        answer_tokens: int,
        num_prompts: int,
        answers_each: int = 1,
        param: str = "n",
    ) -> "Spending":
        """Admits a request, and holds its reservation and its permits while it is answered: `async with meter.hold(...)
        as spending`. Lines of batches need no permits, because the batch runner limits how many are in progress. So all
        permits are left to interactive requests.

        answer_tokens: the maximum number of tokens of all answers together. param: the field that asks for several
        answers to each prompt.

        Entering raises RateLimited, BudgetExhausted, TenantBusy, ServerBusy, Stopping, BadRequest or StoreUnavailable.
        """
        num_answers = num_prompts * answers_each
        charge = Charge(
            prompt_tokens + answer_tokens,
            num_answers if self._counts_answers else 0,
            0 if self._is_counted else 1,
        )
        permits: AbstractContextManager[None] = nullcontext()
        if self._counts_answers:
            permits = self._quotas.limiter.admit_generation(self._tenant, num_prompts, answers_each, param)
        return Spending(self, charge, permits, param)

    async def headers(self) -> dict[str, str]:
        """Returns the headers `x-ratelimit-*`. If both the tenant and the key have a limit, the headers show the limit
        of which less remains.
        """
        try:
            uses = self._uses or await self._quotas.counters.read(self._subjects)
        except StoreUnavailable:
            return {}
        headers: dict[str, str] = {}
        for unit in ("requests", "tokens"):
            limits = [
                (limit - getattr(use, unit), limit, getattr(use, f"{unit}_reset_ms"))
                for subject, use in zip(self._subjects, uses, strict=True)
                if (limit := getattr(subject.quota, f"{unit}_per_minute")) is not None
            ]
            if limits:
                remaining, limit, reset_ms = min(limits)
                headers |= {
                    f"x-ratelimit-limit-{unit}": str(limit),
                    f"x-ratelimit-remaining-{unit}": str(max(0, remaining)),
                    f"x-ratelimit-reset-{unit}": format_duration(reset_ms),
                }
        return headers

    async def reserve(self, charge: Charge, param: str) -> Reservation:
        """See `hold`."""
        for subject in self._subjects:
            if (misfit := _find_misfit(subject, charge, param)) is not None:
                field, error = misfit
                self._quotas.count_refusal(field)
                raise error
        return await self._reserve(charge)

    def settle(self, reservation: Reservation, used_tokens: int, *, counts: bool) -> None:
        if reservation.uses:
            self._quotas.counters.settle(reservation, used_tokens, counts=counts)

    async def _reserve(self, charge: Charge) -> Reservation:
        if not self._subjects:
            return Reservation(charge, (), None)
        made = await self._quotas.reserve(self._subjects, charge)
        self._uses = made.uses
        if isinstance(made, Reservation):
            return made
        raise self._refuse(made, charge)

    def _refuse(self, refusal: Refusal, charge: Charge) -> ApiError:
        """Counts the refusal. Returns the error for the client."""
        obstacle, error = self._explain(refusal, charge)
        self._quotas.count_refusal(obstacle.field)
        return error

    def _explain(self, refusal: Refusal, charge: Charge) -> tuple[Obstacle, ApiError]:
        """Returns the obstacle that lasts longest, and the error that explains it to the client."""
        obstacle = max(refusal.obstacles, key=_severity)
        subject, name = obstacle.subject, obstacle.field
        use = refusal.uses[self._subjects.index(subject)]
        limit: int = getattr(subject.quota, name)
        if name in _BUDGETS:
            return obstacle, self._explain_budget(subject, use, name, limit, charge)
        if name == "concurrent_answers":
            wait_s = self._quotas.limiter.wait_s(use.answers + charge.answers - limit, use.answers)
            return obstacle, TenantBusy(
                f"{_label(subject)} has {use.answers} answers in progress, and the limit is {limit} ({name}); try "
                f"again in {wait_s} s.",
                wait_s,
            )
        wait_ms = obstacle.wait_ms or 1000
        unit, used = ("requests", use.requests) if name == "requests_per_minute" else ("tokens", use.tokens)
        needs = f", and this request needs up to {charge.tokens}" if unit == "tokens" else ""
        return obstacle, RateLimited(
            f"{_label(subject)} has used {used} {unit} in the last minute; the limit is {limit} ({name}){needs}. Try "
            f"again in {wait_ms / 1000:g} s.",
            wait_ms,
        )

    def _explain_budget(self, subject: Subject, use: Use, name: str, limit: int, charge: Charge) -> ApiError:
        used = use.tokens_today if name == "tokens_per_day" else use.tokens_this_month
        reserved = min(use.reserved_tokens, used)
        if used - reserved + charge.tokens <= limit:
            wait_s = self._quotas.limiter.wait_s(1, use.answers)
            left = limit - used + reserved
            return TenantBusy(
                f"{_label(subject)} has {left} tokens left of its budget of {limit} ({name}). Requests in progress "
                f"reserve {reserved} of them, and this request needs up to {charge.tokens}. Try again in {wait_s} s, "
                "or ask for a shorter answer (`max_tokens`, `max_output_tokens`).",
                wait_s,
            )
        ends_at = _end_of(name, self._quotas.utc())
        period = "today" if name == "tokens_per_day" else "this month"
        return BudgetExhausted(
            f"{_label(subject)} has used {used} tokens {period}; the budget is {limit} ({name}), and this request "
            f"needs up to {charge.tokens}. The next budget begins at {ends_at:%Y-%m-%dT%H:%M:%SZ}. Ask the operator "
            "for a higher one.",
            math.ceil(ends_at.timestamp() - self._quotas.utc()),
        )


class Spending:
    """The use of one request, as the engine reports it, and the context of `RequestMeter.hold`. The reservation is
    settled once, when the request has ended for its client and the engine has reported all its parts.
    """

    def __init__(
        self, meter: RequestMeter, charge: Charge, permits: AbstractContextManager[None], param: str
    ) -> None:
        self.tokens = 0
        self._meter = meter
        self._charge = charge
        self._permits = permits
        self._param = param
        self._reservation: Reservation | None = None
        self._num_open = 0
        self._has_ended = False
        self._is_served = True

    async def __aenter__(self) -> Self:
        self._reservation = await self._meter.reserve(self._charge, self._param)
        try:
            self._permits.__enter__()
        except BaseException:
            self._end(is_served=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._permits.__exit__(None, None, None)
        self._end(is_served=kind is None or issubclass(kind, _ENDED_BY_CLIENT))

    def open(self) -> Callable[[RequestUsage], None]:
        """Adds an engine request. Returns the function to call with the usage of this engine request."""
        self._num_open += 1
        return self._report

    def _report(self, usage: RequestUsage) -> None:
        self.tokens += usage.prompt_tokens + usage.generated_tokens
        self._num_open -= 1
        self._settle_if_known()

    def _end(self, *, is_served: bool) -> None:
        """Marks the request as ended for its client. The engine may still report usage."""
        self._has_ended, self._is_served = True, is_served
        self._settle_if_known()

    def _settle_if_known(self) -> None:
        if self._has_ended and not self._num_open:
            assert self._reservation is not None
            self._meter.settle(self._reservation, self.tokens, counts=self._is_served or self.tokens > 0)


def format_duration(ms: int) -> str:
    """Formats a duration as OpenAI does: 12ms, 1.5s, 1m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:g}s"
    return f"{minutes}m{seconds}" if minutes else seconds


def _background_quota(quota: Quota) -> Quota:
    def half(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // 2)

    return replace(
        quota,
        requests_per_minute=half(quota.requests_per_minute),
        tokens_per_minute=half(quota.tokens_per_minute),
        concurrent_answers=None,
    )


def _label(subject: Subject) -> str:
    return "This API key" if subject.key_id else "Your tenant"


def _owner(subject: Subject) -> str:
    return "this API key" if subject.key_id else "your tenant"


def _severity(obstacle: Obstacle) -> tuple[int, int]:
    """Returns a sort key that orders obstacles by how long they last: budgets last longest, the limit of answers in
    progress shortest.
    """
    if obstacle.field in _BUDGETS:
        return 2, _BUDGETS.index(obstacle.field)
    return (0, 0) if obstacle.field == "concurrent_answers" else (1, obstacle.wait_ms or 0)


def _end_of(budget: str, utc: float) -> datetime:
    date = datetime.fromtimestamp(utc, UTC)
    if budget == "tokens_per_day":
        return datetime.fromtimestamp((utc // _DAY_S + 1) * _DAY_S, UTC)
    year, month = divmod(date.year * 12 + date.month, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC)


def _find_misfit(subject: Subject, charge: Charge, param: str) -> tuple[str, ApiError] | None:
    """Returns the field of a limit that the charge alone exceeds, so that waiting would not help, and the error that
    explains it to the client.
    """
    quota = subject.quota
    parts, remedy = (
        ("its inputs", "Send fewer or shorter inputs")
        if param == "input"
        else (
            "its prompts, and `max_tokens` or `max_output_tokens` of each answer",
            "Shorten the prompt, ask for a shorter answer",
        )
    )
    for name in ("tokens_per_minute", *_BUDGETS):
        limit = getattr(quota, name)
        if limit is not None and charge.tokens > limit:
            return name, RateLimited(
                f"This request needs up to {charge.tokens} tokens ({parts}), and the limit of {_owner(subject)} is "
                f"{limit} ({name}). {remedy}, or ask the operator for a higher quota.",
                None,
            )
    limit = quota.concurrent_answers
    if limit is not None and charge.answers > limit:
        return "concurrent_answers", BadRequest(
            f"The request asks for {charge.answers} answers to all its prompts together; the limit of "
            f"{_owner(subject)} is {limit} at once (concurrent_answers). Send fewer prompts, or a smaller `n` and "
            "`best_of`.",
            param,
        )
    return None
