from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slora.core.errors import AdapterFetchFailed, ContextTooLong, DeadlineMissed, RequestFailed
from slora.core.request import (
    FinishReason,
    Pooling,
    PoolingKind,
    RequestUsage,
    StepOutput,
    TenantShare,
    TokenDelta,
    WeightedAdapter,
)
from slora.memory.residency import Resident
from slora.scheduler.budgets import MAX_GROWTH
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora_adapters.version import AdapterVersion
from tests.support.beam_model import search_plainly
from tests.support.scheduler_bench import BEAM_MODEL, COSTS, STOP_TOKEN, BrokenStep, SchedulerBench
from tests.support.scripted_source import FULL_PAGE_BYTES

VERSIONS = [AdapterVersion("tenant", f"digest{n}") for n in range(5)]
# The last adapter fits only a large pool.
PAGES = {version: pages for version, pages in zip(VERSIONS, (1, 1, 2, 3, 9), strict=True)}
SMALL, LARGE = VERSIONS[0], VERSIONS[3]
TENANTS = ("tenant", "other", "third")

shares = st.sampled_from(
    [
        TenantShare(),
        TenantShare(weight=3.0),
        TenantShare(min_share=0.3),
        TenantShare(max_share=0.6),
        TenantShare(priority=1),
    ]
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests with one or more choices or beams, or for embeddings, arrive and end in any order, in a pool short of
    pages.

    Adapters arrive late or never, steps break, and the operator pins adapters. Some models have windows or two sets of
    rotary factors.
    """

    @initialize(
        num_pages=st.integers(2, 12),
        num_slots=st.integers(1, 5),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 9),
        window=st.none() | st.integers(1, 10),
        rope_switch=st.none() | st.integers(1, 16),
        host_pages=st.none() | st.integers(0, 12),
        shares=st.just((TenantShare(),) * 3) | st.tuples(shares, shares, shares),
        options=st.fixed_dictionaries(
            {
                "prefix_cache": st.sampled_from(["off", "tenant", "public"]),
                "preemption": st.sampled_from(["auto", "swap", "recompute"]),
                "scheduling": st.sampled_from(["fair", "fcfs"]),
                "swap_pages": st.integers(0, 12),
                "load_pages": st.integers(1, 3),
                "prompt_lookup_tokens": st.integers(0, 6),
            }
        ),
        random=st.randoms(use_true_random=False),
    )
    def start(
        self,
        num_pages: int,
        num_slots: int,
        max_num_seqs: int,
        spare_budget: int,
        window: int | None,
        rope_switch: int | None,
        host_pages: int | None,
        shares: tuple[TenantShare, ...],
        options: dict[str, Any],
        random: Random,
    ) -> None:
        self.bench = SchedulerBench(
            PAGES,
            num_pages=num_pages,
            num_slots=num_slots,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            window=window,
            rope_switch=rope_switch,
            host_pages=host_pages,
            choose=self._choose,
            **options,
        )
        self.shares = dict(zip(TENANTS, shares, strict=True))
        for tenant, share in self.shares.items():
            self.bench.memory.tenants.set_share(tenant, share)
        self.random = random
        self.count = 0
        self.requests: dict[str, Sequence] = {}
        self.unfinished: dict[str, set[int]] = {}
        self.answered: set[str] = set()  # requests whose choices all ended without an error
        self.drawn: dict[tuple[str, int], list[int | None]] = {}
        self.num_told: dict[tuple[str, int], int] = {}
        self.found: dict[str, list[tuple[int, ...]]] = {}
        self.deleted: set[AdapterVersion] = set()
        self.pinned: set[AdapterVersion] = set()

    def _choose(self, sequence: Sequence) -> int | None:
        if sequence.search is not None:  # any token is accepted
            return self.random.choice([None, *[1] * 500])
        token = self.random.choice([None, STOP_TOKEN, *[1, 2] * 15])
        self.drawn.setdefault((sequence.request.request_id, sequence.index), []).append(token)
        return token

    @rule(
        prompt=st.integers(0, 19),
        last_token=st.integers(1, 2),
        max_tokens=st.none() | st.integers(1, 20),
        weights=st.dictionaries(st.sampled_from(VERSIONS), st.sampled_from([1.0, -0.5]), max_size=3),
        tenant=st.sampled_from(TENANTS),
        n=st.integers(1, 4),
        beams=st.none() | st.none() | st.integers(1, 4),
        priority=st.integers(0, 1),
        deadline_s=st.none() | st.sampled_from([0.01, 3.0]),
        is_background=st.booleans(),
        pooling=st.sampled_from([None, None, Pooling(), Pooling(PoolingKind.MEAN)]),
    )
    def add(
        self,
        prompt: int,
        last_token: int,
        max_tokens: int | None,
        weights: dict[AdapterVersion, float],
        tenant: str,
        n: int,
        beams: int | None,
        pooling: Pooling | None,
        **fields: Any,
    ) -> None:
        """Prompts have few different tokens, so that many share a beginning. Adapters of one tenant are composed."""
        tenant = next((version.tenant for version in weights), tenant)
        own = [version for version in weights if version.tenant == tenant][: self.bench.config.num_slots]
        if not self.deleted.isdisjoint(own):
            return
        adapters = [WeightedAdapter(version, weights[version]) for version in own]
        fields |= {"tokens": [1] * prompt + [last_token], "tenant": tenant, "share": self.shares[tenant]}
        most = self.bench.config.max_num_seqs if beams is None else min(beams, self.bench.config.max_num_seqs)
        n, beams = min(n, most), None if beams is None else most
        if pooling is not None:
            n, beams = 1, None
        self.count += 1
        request_id = str(self.count)
        try:
            sequence = self.bench.add(
                request_id,
                max_tokens=max_tokens,
                adapters=adapters,
                n=n,
                beams=beams,
                pooling=pooling,
                **fields,
            )
        except ContextTooLong:
            assert not self.bench.scheduler.find(request_id)
            return
        self.requests[request_id] = sequence
        self.unfinished[request_id] = set(range(n))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.unfinished)))
        del self.unfinished[request_id]
        self.bench.scheduler.abort(request_id)
        self.bench.scheduler.abort(request_id)

    @precondition(lambda self: self._choices_under_way())
    @rule(data=st.data())
    def abort_choice(self, data: st.DataObject) -> None:
        request_id, index = data.draw(st.sampled_from(self._choices_under_way()))
        self.bench.scheduler.abort(request_id, index)
        self.bench.scheduler.abort(request_id, index)
        self._finish(request_id, index)

    def _choices_under_way(self) -> list[tuple[str, int]]:
        """The choices that have sampled a token."""
        return [choice for choice in self.drawn if choice[1] in self.unfinished.get(choice[0], ())]

    def _finish(self, request_id: str, index: int) -> None:
        self.unfinished[request_id].remove(index)
        if not self.unfinished[request_id]:
            del self.unfinished[request_id]
            self.answered.add(request_id)

    @rule(version=st.sampled_from(VERSIONS))
    def forget(self, version: AdapterVersion) -> None:
        self.bench.scheduler.remove_adapter(version)
        self.deleted.add(version)
        self.pinned.discard(version)

    @rule(versions=st.sets(st.sampled_from(VERSIONS), max_size=3))
    def set_pins(self, versions: set[AdapterVersion]) -> None:
        self.pinned = versions - self.deleted
        self.bench.scheduler.set_pins(sorted(self.pinned, key=str))

    @rule(version=st.sampled_from(VERSIONS))
    def prewarm(self, version: AdapterVersion) -> None:
        if version not in self.deleted:
            self.bench.scheduler.prewarm(version)

    @precondition(lambda self: self.bench.source.in_flight)
    @rule(data=st.data())
    def adapter_arrives(self, data: st.DataObject) -> None:
        self.bench.source.deliver([self._in_flight(data)])

    @precondition(lambda self: self.bench.source.in_flight)
    @rule(data=st.data(), code=st.sampled_from(["not_found", "unavailable", "corrupt"]))
    def adapter_fails(self, data: st.DataObject, code: str) -> None:
        self.bench.source.fail(self._in_flight(data), code)

    def _in_flight(self, data: st.DataObject) -> AdapterVersion:
        return data.draw(st.sampled_from(sorted(self.bench.source.in_flight, key=str)))

    @rule(breaks=st.integers(0, 9).map(lambda n: n == 0), culprits=st.sampled_from([0, 0, 0, 0, 0, 1, 2]))
    def step(self, breaks: bool, culprits: int) -> None:
        self.bench.now += 1.0
        waiting_for_nothing = self.bench.scheduler.has_work
        sequences = [one for request_id in self.unfinished for one in self.bench.scheduler.find(request_id)]
        is_short = any(one.is_starving for one in sequences)
        kept = [] if is_short or self._are_bounded() else self._idle_pins()
        num_residents, num_loads = len(self.bench.residency), self.bench.scheduler.adapters.num_loads
        crowd, num_preemptions = self._crowd(), self.bench.scheduler.num_preemptions
        for output in self.bench.step(breaks=breaks, culprits=culprits):
            self._take(output)
        self._check_background()
        num_loads = self.bench.scheduler.adapters.num_loads - num_loads
        has_slots = num_residents + num_loads <= self.bench.config.num_slots
        stayed = crowd & self._crowd() if self.bench.scheduler.num_preemptions == num_preemptions else set()
        if len(stayed) > 1 and has_slots:
            assert all(self.bench.residency.find(one.version) is one for one in kept), (
                "a pinned adapter left while others ran"
            )
        aside = self.bench.scheduler.num_awaiting_adapter
        unfinished = sum(len(self.bench.scheduler.find(request_id)) for request_id in self.unfinished)
        if waiting_for_nothing and unfinished > aside:
            assert culprits or self.bench.last_plan.chunks or self.bench.last_plan.loads, (
                "there was work, and nothing was done"
            )

    def _idle_pins(self) -> list[Resident]:
        residents = list(self.bench.residency)
        return [one for one in residents if one.is_pinned and one.is_loaded and not one.num_users]

    def _are_bounded(self) -> bool:
        """Whether a tenant's share may be the reason why a pin is not loaded."""
        return any(tenant.is_bounded for tenant in self.bench.memory.tenants)

    def _crowd(self) -> set[str]:
        found = (self.bench.scheduler.find(request_id) for request_id in self.unfinished)
        return {one.request.request_id for choices in found for one in choices if one.is_running}

    def _take(self, output: StepOutput) -> None:
        if output.error is not None:
            assert isinstance(
                output.error,
                AdapterFetchFailed | ContextTooLong | DeadlineMissed | RequestFailed | BrokenStep,
            ), output.error
            del self.unfinished[output.request_id]
            return
        assert output.delta is not None
        request_id, index = output.request_id, output.delta.index
        assert index in self.unfinished[request_id], "a choice that is over spoke again"
        if self.requests[request_id].search is not None:
            self._take_hypothesis(request_id, output.delta)
            return
        if self.requests[request_id].pooled is not None:
            assert output.delta.embedding == self.bench.embed_plainly(self.requests[request_id])
            assert output.delta.finish_reason == FinishReason.STOP and not output.delta.token_ids
            self._finish(request_id, index)
            return
        num_told = self.num_told.get((request_id, index), 0)
        new = output.delta.token_ids
        self.num_told[request_id, index] = num_told = num_told + len(new)
        drawn, not_told = self.drawn[request_id, index][:num_told], self.drawn[request_id, index][num_told:]
        assert new and tuple(drawn[-len(new) :]) == new
        assert not_told in ([], [None]), "a token that was sampled is missing"
        stopped, full = new[-1] == STOP_TOKEN, num_told == self.requests[request_id].max_tokens
        expected = FinishReason.STOP if stopped else FinishReason.LENGTH if full else None
        assert output.delta.finish_reason == expected
        # A choice that was to continue may have ended, because another choice of its request failed in this step.
        left = [one for one in self.bench.scheduler.find(request_id) if one.index == index]
        assert all(one.token_ids[one.num_prompt :] == drawn for one in left)
        if expected is not None:
            assert not left
            self._finish(request_id, index)

    def _take_hypothesis(self, request_id: str, delta: TokenDelta) -> None:
        sequence, found = self.requests[request_id], self.found.setdefault(request_id, [])
        assert delta.finish_reason is not None and delta.index == len(found)
        found.append(delta.token_ids)
        self._finish(request_id, delta.index)
        if request_id in self.unfinished:
            return
        assert not self.bench.scheduler.find(request_id), "a beam outlived its search"
        params = sequence.request.sampling
        expected = search_plainly(BEAM_MODEL, params, sequence.stop_ids, sequence.max_tokens)
        assert found == [one.tokens for one in expected]

    def _check_background(self) -> None:
        """Background sequences run beside interactive ones only if no interactive sequence waits for their places or
        their pages, and they lengthen the step only a little.
        """
        plan = self.bench.last_plan
        interactive = [chunk for chunk in plan.chunks if not chunk.sequence.is_background]
        if interactive:
            alone, together = (
                COSTS.step_seconds(StepPlan(chunks).measure_work(FULL_PAGE_BYTES)._replace(loaded_bytes=0))
                for chunks in (interactive, plan.chunks)
            )
            loads_s = 3 * COSTS.load_s(FULL_PAGE_BYTES)  # of the interactive requests, in the same step
            assert together - alone <= MAX_GROWTH * (alone + loads_s) + 1e-9

    @invariant()
    def nobody_is_lost_and_no_page_leaks(self) -> None:
        scheduler = self.bench.scheduler
        scheduler.check_invariants()
        left = {request_id: scheduler.find(request_id) for request_id in self.unfinished}
        assert scheduler.num_running + scheduler.num_waiting == sum(map(len, left.values()))
        for request_id, choices in left.items():
            if choices[0].search is not None:  # the scheduler checks the beams itself
                continue
            forked = choices[0].num_choices == 1
            indexes = {one.index for one in choices} if forked else set(range(choices[0].num_choices))
            assert self.unfinished[request_id] == indexes, "a choice is lost"

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for output in self.bench.run_to_end(patience=1000):  # beams report nothing before their end
            self._take(output)
        assert not self.unfinished, "a request ended without tokens or an error"
        self.bench.come_to_rest(pauses=True)
        assert self.bench.pool.num_held == 0
        self._check_usage()
        assert self.bench.source.num_pinned == 0, "a host copy was never released"
        assert all(self.bench.residency.find(version) is None for version in self.deleted)
        if not self._are_bounded():
            self._check_that_pins_are_back()

    def _check_usage(self) -> None:
        usages = self.bench.usage
        assert usages.keys() == self.requests.keys()
        total = sum(usages.values(), start=RequestUsage())
        assert total == self.bench.scheduler.total_usage
        assert total.page_seconds == pytest.approx(self.bench.page_seconds, abs=1e-4)
        for request_id, sequence in self.requests.items():
            usage = usages[request_id]
            assert 0 <= usage.cached_tokens <= usage.prompt_tokens <= sequence.num_prompt
            assert usage.page_seconds >= 0
            if request_id not in self.answered:
                continue
            assert usage.prompt_tokens == sequence.num_prompt
            if sequence.search is None:
                # None after a draft that was right is sampled again, unless the choice is aborted first.
                drawn = [token for name, own in self.drawn.items() if name[0] == request_id for token in own]
                assert usage.generated_tokens == sum(token is not None for token in drawn)

    def _check_that_pins_are_back(self) -> None:
        residency = self.bench.residency
        for version in self.pinned:
            too_many = residency.num_pinned_pages + PAGES[version] > self.bench.pool.num_pages // 2
            too_many = too_many or residency.num_pinned == self.bench.config.num_slots
            resident = residency.find(version)
            assert too_many or (resident is not None and resident.is_loaded), f"{version} did not come back"


TestScheduler = SchedulerMachine.TestCase

work = st.tuples(st.integers(1, 12), st.integers(1, 12), st.none() | st.sampled_from(VERSIONS[:3]))


@given(
    st.lists(st.lists(work, max_size=3), max_size=12),
    st.sets(st.integers(0, 11), min_size=1),
    st.integers(8, 14),
)
def test_a_request_whose_adapter_is_late_never_delays_others(
    arrivals: list[list[tuple[int, int, AdapterVersion | None]]], late_at: set[int], num_pages: int
) -> None:
    def trace(*, with_late: bool) -> list[list[tuple[str, int]]]:
        bench = SchedulerBench(PAGES, num_pages=num_pages, max_num_seqs=4, max_num_batched_tokens=8)
        steps = []
        for number in range(60):
            if with_late and number in late_at:
                bench.add(f"late{number}", prompt=6, max_tokens=6, adapter=LARGE)
            for place, (prompt, tokens, adapter) in enumerate(
                arrivals[number : number + 1] and arrivals[number]
            ):
                bench.add(f"{number}.{place}", prompt=prompt, max_tokens=tokens, adapter=adapter)
            bench.source.deliver(bench.source.in_flight - {LARGE})
            bench.step()
            chunks = [(c.sequence.request.request_id, c.num_tokens) for c in bench.last_plan.chunks]
            steps.append(sorted(chunks))
        return steps

    assert trace(with_late=True) == trace(with_late=False)


@pytest.mark.parametrize("older", [False, True])
def test_every_decoding_request_gets_a_token_per_step_beside_a_long_prompt(older: bool) -> None:
    bench = SchedulerBench(PAGES, num_pages=50, max_num_seqs=4, max_num_batched_tokens=8)
    if older:  # the older request arrives first, but its adapter arrives late
        bench.add("long", prompt=40, adapter=SMALL)
    for name in "abc":
        bench.add(name, max_tokens=20)
    bench.step()
    if not older:
        bench.add("long", prompt=40, adapter=SMALL)
    bench.source.deliver()
    for _ in range(8):
        bench.step()
        assert bench.planned == {"a": 1, "b": 1, "c": 1, "long": 5}


def test_running_requests_finish_on_a_deleted_adapter() -> None:
    """Born from a bug: a request that was preempted or not yet started fetched the deleted adapter again and failed."""
    bench = SchedulerBench(PAGES, num_pages=8, max_num_seqs=2)
    bench.add("old", prompt=4, max_tokens=24)
    bench.add("preempted", prompt=4, max_tokens=8, adapter=SMALL)
    bench.add("waiting", prompt=4, max_tokens=8, adapter=SMALL)
    outputs = bench.deliver_and_step()
    bench.scheduler.remove_adapter(SMALL)
    outputs += bench.run_to_end(200)
    assert bench.scheduler.num_preemptions > 0
    assert all(output.error is None for output in outputs)
    assert sum(output.request_id == "preempted" for output in outputs) == 8
    assert sum(output.request_id == "waiting" for output in outputs) == 8
    assert bench.residency.find(SMALL) is None
    assert SMALL in bench.source.discarded


def test_a_failed_fetch_fails_only_the_requests_that_wait_for_it() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.add("base", max_tokens=3)
    bench.add("good", max_tokens=3, adapter=SMALL)
    for name in ("bad", "worse"):
        bench.add(name, max_tokens=3, adapter=LARGE)
    bench.source.fail(LARGE, "corrupt")
    outputs = list(bench.run_to_end(20))
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert errors.keys() == {"bad", "worse"}
    assert all(isinstance(e, AdapterFetchFailed) and e.code == "corrupt" for e in errors.values())


def test_a_request_too_long_for_the_pool_is_refused_at_once() -> None:
    bench = SchedulerBench(PAGES, num_pages=4)
    bench.add("fits", prompt=10, max_tokens=7)
    with pytest.raises(
        ContextTooLong,
        match=r"length is \d+ tokens .* 5 pages for 17 tokens and 0 for its adapter, but the pool has only 4",
    ):
        bench.add("too long", prompt=10, max_tokens=8)


def test_an_open_ended_request_is_cut_to_what_the_pool_holds() -> None:
    bench = SchedulerBench(PAGES, num_pages=4)
    bench.add("open", prompt=6, max_tokens=None, adapter=SMALL)
    outputs = list(bench.run_to_end(20))
    # The 3 pages beside the adapter hold 12 tokens. The KV of the last token is never computed.
    assert len(outputs) == 12 - 6 + 1
    assert outputs[-1].delta is not None and outputs[-1].delta.finish_reason is FinishReason.LENGTH


def test_requests_for_one_adapter_share_one_fetch_and_one_copy() -> None:
    bench = SchedulerBench(PAGES, num_pages=20)
    for name in "abc":
        bench.add(name, max_tokens=5, adapter=LARGE)
    list(bench.run_to_end(20))
    assert bench.source.num_fetches[LARGE] == 1
    assert bench.scheduler.adapters.num_loads == 1


def test_the_fetch_of_an_aborted_request_serves_the_next_request() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.add("gone", adapter=SMALL)
    bench.scheduler.abort("gone")
    bench.add("next", adapter=SMALL)
    assert [output.request_id for output in bench.run_to_end(5)] == ["next"]
    assert bench.source.num_pinned == 0


def test_a_step_with_a_failed_load_is_undone_and_its_requests_are_retried() -> None:
    """Born from a fault: all requests in a broken step ended with an error."""
    bench = SchedulerBench(PAGES, num_pages=12)
    bench.add("needs it", max_tokens=3, adapter=SMALL)
    bench.add("beside it", prompt=3, max_tokens=3)
    bench.source.deliver([SMALL])
    assert bench.step(breaks=True) == []
    assert bench.residency.find(SMALL) is None
    outputs = list(bench.run_to_end(5))
    assert [one.error for one in outputs] == [None] * 6


def test_a_request_fails_alone_after_three_failed_loads_of_its_adapter() -> None:
    bench = SchedulerBench(PAGES, num_pages=12)
    bench.add("needs it", max_tokens=3, adapter=SMALL)
    bench.step()
    bench.add("beside it", prompt=3, max_tokens=30)
    outputs = []
    while bench.scheduler.find("needs it"):
        bench.source.deliver()
        outputs += bench.step(breaks=True)
        if not bench.scheduler.find("needs it"):
            break
        outputs += bench.step()
    assert [type(one.error) for one in outputs if one.request_id == "needs it"] == [BrokenStep]
    assert bench.source.num_fetches[SMALL] == 3
    assert all(one.error is None for one in bench.run_to_end(5))


def test_a_chunk_that_cannot_be_computed_ends_its_request_alone() -> None:
    bench = SchedulerBench(PAGES, num_pages=12)
    bench.add("culprit", prompt=2, max_tokens=3, n=2)
    bench.add("innocent", prompt=2, max_tokens=3)
    first, second = bench.step(culprits=1)
    assert first.request_id == "culprit" and isinstance(first.error, BrokenStep)
    assert second.request_id == "innocent" and second.error is None
    assert [one.error for one in bench.run_to_end(5)] == [None] * 2


def test_the_choices_of_a_request_share_the_pages_of_its_prompt() -> None:
    """10 tokens fill two blocks and a half. Only the half block is copied, for all choices but the last one that
    writes to it."""
    bench = SchedulerBench(PAGES, num_pages=20, max_num_batched_tokens=8)
    bench.add("a", prompt=10, max_tokens=6, n=3, adapter=SMALL)
    bench.source.deliver()
    assert bench.step() == []
    assert [output.delta and output.delta.index for output in bench.step()] == [0, 1, 2]
    assert bench.pool.num_held == 1 + 3
    bench.step()
    assert bench.num_copies == 2
    assert bench.pool.num_held == 1 + 2 + 3
    outputs = list(bench.run_to_end(10))
    assert [output.delta and output.delta.finish_reason for output in outputs[-3:]] == [
        FinishReason.LENGTH
    ] * 3
    assert bench.num_copies == 2 and bench.pool.num_held == 0


def test_preempting_one_choice_frees_only_its_own_pages() -> None:
    """Two choices of 12 tokens take 5 pages of 4 tokens, because they share the prompt's first page. The pool has 4
    pages."""
    bench = SchedulerBench(PAGES, num_pages=4)
    bench.add("a", prompt=5, max_tokens=8, n=2)
    outputs = list(bench.run_to_end(50))
    assert bench.scheduler.num_preemptions == 1
    told = [output.delta.index for output in outputs if output.delta]
    assert told.count(0) == told.count(1) == 8


def test_a_choice_is_aborted_alone_and_a_request_with_all_its_choices() -> None:
    bench = SchedulerBench(PAGES, num_pages=20)
    bench.add("a", prompt=6, max_tokens=9, n=3)
    bench.scheduler.abort("a", 0)  # before the request has several choices
    bench.step()
    bench.scheduler.abort("a", 0)
    assert [output.delta and output.delta.index for output in bench.step()] == [1, 2]
    bench.scheduler.abort("a")
    bench.scheduler.check_invariants()
    assert bench.scheduler.num_running == bench.pool.num_held == 0


@pytest.mark.parametrize(
    ("several", "sampled", "num_told"),
    [({"n": 3}, [1, 1, 1, 1, None, 1], 1), ({"beams": 3}, [1, 1, 1, None, 1, 1], 0)],
)
def test_logits_of_one_choice_or_beam_that_are_not_finite_end_the_request_once(
    several: dict[str, int], sampled: list[int | None], num_told: int
) -> None:
    tokens = iter(sampled)
    bench = SchedulerBench({}, num_pages=20, choose=lambda sequence: next(tokens))
    bench.add("a", prompt=6, max_tokens=9, **several)
    bench.step()
    *told, last = bench.step() or bench.step()
    assert len(told) == num_told and isinstance(last.error, RequestFailed)
    assert bench.scheduler.num_running == bench.pool.num_held == 0


def test_choices_without_a_place_are_queued_before_later_requests() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, max_num_seqs=4)
    bench.add("first", max_tokens=3)
    bench.add("four", prompt=2, max_tokens=2, n=4)
    bench.add("last", max_tokens=2)
    started = {}
    for number in range(8):
        bench.step()
        for chunk in bench.last_plan.chunks:
            started.setdefault(chunk.sequence.request.request_id, number)
    assert started == {"first": 0, "four": 0, "last": 2}
    assert bench.usage["four"].generated_tokens == 8 and bench.usage["four"].prompt_tokens == 2
    assert bench.timings["four"].num_preemptions == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, 80), (80, 1), (30, 50)])
@pytest.mark.parametrize("budget", [2, 7, 16])
def test_a_sequence_of_ten_windows_holds_no_more_than_one_and_its_chunk(
    budget: int, prompt: int, max_tokens: int
) -> None:
    bench = SchedulerBench(PAGES, num_pages=40, max_num_seqs=2, max_num_batched_tokens=budget, window=8)
    bench.add("long", prompt=prompt, max_tokens=max_tokens)
    most = 0
    while bench.num_unfinished:
        bench.step()
        chunks = bench.last_plan.chunks
        most = max(most, *(len(chunk.sequence.blocks.held_pages) for chunk in chunks))
        for chunk in chunks:
            assert len(chunk.sequence.blocks.held_pages) <= 8 // 4 + -(-chunk.num_tokens // 4) + 1
    assert prompt > 1 or most == 3, "one by one, 8 tokens touch three blocks of 4 at most"


def test_a_sequence_longer_than_the_pool_runs_if_its_window_fits() -> None:
    """5 pages are 20 tokens. A window of 9 leaves at most 8 tokens for a chunk: 9 - 1 + 9 tokens may touch 5 blocks."""
    bench = SchedulerBench(PAGES, num_pages=5, max_num_batched_tokens=16, window=9)
    bench.add("long", prompt=50, max_tokens=50)
    outputs = list(bench.run_to_end(100))
    assert len(outputs) == 50 and bench.scheduler.num_preemptions == 0
    bench = SchedulerBench(PAGES, num_pages=5, window=9)
    bench.add("beside its adapter", prompt=50, max_tokens=5, adapter=VERSIONS[2])
    bench.add("neighbour", prompt=30, max_tokens=5)
    assert all(output.error is None for output in bench.run_to_end(200))


def test_a_sequence_whose_window_does_not_fit_is_refused_and_an_open_ended_one_is_cut() -> None:
    bench = SchedulerBench(PAGES, num_pages=4, window=14)
    with pytest.raises(ContextTooLong, match="5 pages for 99 tokens"):
        bench.add("long", prompt=50, max_tokens=50)
    bench.add("open", prompt=6, max_tokens=None)
    assert len(list(bench.run_to_end(50))) == 16 - 6 + 1
    bench = SchedulerBench(PAGES, num_pages=5, window=14)
    bench.add("open", prompt=6, max_tokens=None)
    assert len(list(bench.run_to_end(100))) == 64


def test_each_choice_frees_the_blocks_behind_its_own_window() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, window=6)
    bench.add("a", prompt=16, max_tokens=12, n=3)
    bench.step()
    assert bench.pool.num_held == 4
    bench.step()  # two blocks are behind the window of token 16; each choice needs one new block of its own
    assert bench.pool.num_held == 4 - 2 + 3
    assert len(list(bench.run_to_end(20))) == 3 * 10
    assert bench.num_copies == 0


def test_a_sequence_that_grows_long_is_computed_again_from_its_first_token() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, max_num_batched_tokens=8, rope_switch=10)
    bench.add("a", prompt=9, max_tokens=6, n=2)
    starts: list[list[tuple[int, int]]] = []
    while bench.num_unfinished:
        bench.step()
        starts.append([(chunk.start, chunk.num_tokens) for chunk in bench.last_plan.chunks])
    # Both have 11 tokens after the third step. The older one is recomputed first, in chunks of the remaining budget.
    assert starts[:4] == [[(0, 8)], [(8, 1)], [(9, 1), (9, 1)], [(0, 8)]]
    assert sum(count for step in starts for _, count in step) == 9 + 2 + 2 * (11 + 3)
    assert bench.pool.num_held == 0


def test_a_prompt_that_is_long_from_the_start_is_computed_once() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, max_num_batched_tokens=8, rope_switch=10)
    bench.add("a", prompt=17, max_tokens=2)
    assert len(list(bench.run_to_end(5))) == 2


def test_fetches_wait_until_the_host_cache_has_room() -> None:
    """Born from a bug: all adapters were requested at once, and those that found no room within 30 s failed as
    unavailable."""
    versions = [AdapterVersion("tenant", f"one of many {n}") for n in range(30)]
    bench = SchedulerBench(dict.fromkeys(versions, 2), num_pages=9, max_num_seqs=3, host_pages=8)
    for version in versions:
        bench.add(version.digest, prompt=5, max_tokens=9, adapter=version)
    most, started = 0, []
    while bench.num_unfinished:
        outputs = bench.deliver_and_step()
        assert all(output.error is None for output in outputs)
        started += [load.resident.version for load in bench.last_plan.loads]
        most = max(most, bench.source.wanted_bytes)
    assert started == versions
    assert 2 * 2 * FULL_PAGE_BYTES <= most <= bench.source.capacity_bytes
    assert set(bench.source.num_fetches.values()) == {1} and bench.source.num_pinned == 0


def test_an_adapter_larger_than_its_share_of_the_host_cache_is_fetched_alone() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, host_pages=9)
    for number, version in enumerate([VERSIONS[4], SMALL, VERSIONS[4], LARGE]):
        bench.add(str(number), adapter=version)
    assert bench.source.in_flight == {VERSIONS[4]}
    assert all(output.error is None for output in bench.run_to_end(20))


def test_aborting_a_request_starts_the_next_fetch() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, host_pages=0)
    for number, version in enumerate(VERSIONS[:3]):
        bench.add(str(number), adapter=version)
    bench.scheduler.abort("1")
    assert bench.source.in_flight == {VERSIONS[0]}
    bench.source.deliver()
    bench.scheduler.abort("0")
    bench.step()
    assert bench.source.in_flight == {VERSIONS[2]}
    assert [output.request_id for output in bench.run_to_end(5)] == ["2"]


def test_a_failed_fetch_starts_the_next_fetch() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, host_pages=0)
    for number, version in enumerate(VERSIONS[:2]):
        bench.add(str(number), adapter=version)
    bench.source.fail(VERSIONS[0], "corrupt")
    assert [output.request_id for output in bench.step()] == ["0"]
    assert bench.source.in_flight == {VERSIONS[1]}


def test_pages_reserved_for_a_chunk_that_never_ran_are_not_swapped() -> None:
    """Born from a bug: a request that was preempted during its adapter's load swapped its empty pages out to the
    host.

    It then found no room to swap them in.
    """
    bench = SchedulerBench(PAGES, num_pages=14, preemption="swap", swap_pages=20, load_pages=1)
    bench.add("base", prompt=4, max_tokens=28)
    bench.step()
    bench.add("late", prompt=8, max_tokens=4, adapter=VERSIONS[4])
    bench.deliver_and_step()
    (late,) = bench.scheduler.find("late")
    assert late.is_running and late.num_computed == 0 and late.blocks.num_pages == 2
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert not late.is_running and bench.scheduler.swapping.num_pages_out == 0
    assert all(output.error is None for output in bench.run_to_end(60))


def test_beam_searches_that_block_each_other_all_complete() -> None:
    """Each search has running beams that wait for a preempted beam, and the running beams hold all pages. One whole
    search is preempted."""
    bench = SchedulerBench({}, num_pages=6)
    for name, tenant in (("a", "x"), ("b", "y"), ("c", "x")):
        bench.add(name, prompt=4 if name == "a" else 3, max_tokens=8, beams=2, tenant=tenant)
    outputs = list(bench.run_to_end(100))
    assert bench.scheduler.num_preemptions > 0
    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    assert all(output.error is None for output in outputs)


def stay_apart(tokens: tuple[int, ...]) -> list[float]:
    """From the first token on, three beams stay apart. Each has one probable continuation."""
    return [-99.0, 0.0, -60.0, -61.0, -62.0] if tokens else [-99.0, -1.0, -1.1, -1.2, -50.0]


def test_a_dropped_beam_frees_its_pages_at_once() -> None:
    """After the first token, one of three beams has all the best continuations. From there on, three beams stay
    apart."""

    def model(tokens: tuple[int, ...]) -> list[float]:
        falls_behind = len(tokens) == 1 and tokens[0] != 1
        return [-99.0, -20.0, -21.0, -22.0, -23.0] if falls_behind else stay_apart(tokens[1:])

    bench = SchedulerBench({}, num_pages=20, beam_model=model)
    bench.add("a", prompt=8, max_tokens=9, beams=3)
    bench.step()
    assert bench.pool.num_held == 2
    bench.step()  # each beam wrote to a block of its own; two are dropped, and the third forks
    beams = bench.scheduler.find("a")
    assert [beam.token_ids[8] for beam in beams] == [1, 1, 1]
    assert bench.pool.num_held == 2 + 1 and bench.num_copies == 0
    bench.step()
    assert bench.pool.num_held == 2 + 3 and bench.num_copies == 2


def test_a_search_takes_a_place_per_beam_and_is_charged_for_all_beams() -> None:
    bench = SchedulerBench({}, num_pages=20, max_num_seqs=4)
    bench.add("first", max_tokens=3, tenant="other")
    search = bench.add("search", prompt=2, max_tokens=5, beams=4)
    started, seated = {}, []
    for number in range(12):
        bench.step()
        seated += bench.last_plan.rows_to_write
        for chunk in bench.last_plan.chunks:
            started.setdefault(chunk.sequence.request.request_id, number)
    assert started == {"first": 0, "search": 0}
    assert len(seated) > 1 + 4 and len(set(map(id, seated))) == len(seated), "a row was filled in twice"
    length = len(search_plainly(BEAM_MODEL, search.request.sampling, search.stop_ids, 5)[0].tokens)
    assert length > 1 and search.tenant.service == 2 + 2 * (1 + 4 * (5 - 1))


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_a_search_waits_for_its_preempted_beam(way: str) -> None:
    options = {"preemption": way, "swap_pages": 9, "scheduling": "fcfs"}
    bench = SchedulerBench({}, num_pages=9, beam_model=stay_apart, **options)
    bench.add("older", prompt=8, max_tokens=12)
    search = bench.add("search", prompt=4, max_tokens=8, beams=3)
    waits = []
    while bench.scheduler.find("search"):
        bench.step()
        waits.append(sum(beam.has_proposed for beam in bench.scheduler.find("search")))
    assert 0 < max(waits) < 3, "nobody waited"
    assert bench.scheduler.num_preemptions > 0
    assert (bench.scheduler.swapping.num_pages_in > 0) == (way == "swap")
    assert search.is_finished


def lower_ceiling(bench: SchedulerBench, *, max_share: float) -> None:
    bench.memory.tenants.set_share("tenant", TenantShare(max_share=max_share))


@pytest.mark.parametrize("beams", [None, 3])
@pytest.mark.parametrize("max_tokens", [None, 24], ids=["open-ended", "of 24 tokens"])
@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_a_request_that_holds_more_than_a_lowered_ceiling_fails(
    way: str, max_tokens: int | None, beams: int | None
) -> None:
    """Born from two bugs after a tenant's ceiling was lowered.

    An open-ended request waited for ever, because its length was cut to less than it already had. A request with two
    choices lost the second one, and its first choice was then computed in pages that other sequences already used.
    """
    bench = SchedulerBench({}, num_pages=36, beam_model=stay_apart, preemption=way, swap_pages=9)
    bench.add("cut", prompt=4, max_tokens=max_tokens, n=3 if beams is None else 1, beams=beams)
    bench.add("other", prompt=4, max_tokens=30, tenant="other")
    bench.run_steps(9)
    assert bench.memory.tenants.find("tenant").num_pages > 6
    lower_ceiling(bench, max_share=6 / 36)
    ends = {output.request_id: output for output in bench.run_to_end(100)}
    error = ends["cut"].error
    assert isinstance(error, ContextTooLong) and "its tenant may hold only 6 pages of the pool" in str(error)
    assert ends["other"].error is None
    assert bench.scheduler.num_running == bench.pool.num_held == 0


def test_a_search_ends_when_one_resumed_beam_has_to_end() -> None:
    """The tenant's ceiling is lowered while the search runs. A beam was preempted for an older request.

    The preempted beam then has room for 3 pages: 12 tokens, and the last one, whose KV is never computed.
    """
    bench = SchedulerBench({}, num_pages=18, beam_model=stay_apart, scheduling="fcfs", preemption="recompute")
    bench.add("older", prompt=40, max_tokens=8, tenant="other")
    search = bench.add("search", prompt=4, max_tokens=None, beams=3)
    while not search.num_generated:
        bench.step()
    lower_ceiling(bench, max_share=0.5)
    ends = {output.request_id: output for output in bench.run_to_end(100)}
    assert bench.scheduler.num_preemptions > 0
    delta = ends["search"].delta
    assert delta is not None and len(delta.token_ids) == 12 - 4 + 1


def test_forks_of_an_aborted_search_are_not_started() -> None:
    """Their rows may already belong to other sequences."""
    bench = SchedulerBench({}, num_pages=20, beam_model=stay_apart)
    bench.add("a", prompt=4, max_tokens=9, beams=3)
    bench.step()
    assert bench.scheduler.num_running == 3
    bench.scheduler.abort("a")
    bench.step()
    assert bench.last_plan.rows_to_write == [] and bench.pool.num_held == 0


def test_the_cached_tokens_of_a_search_are_reported_once_with_its_best_answer() -> None:
    bench = SchedulerBench({}, num_pages=20, prefix_cache="tenant")
    found = []
    for name in ("first", "second"):
        bench.add(name, prompt=9, max_tokens=4, n=2, beams=3)
        found.append([o.delta.num_cached for o in bench.run_to_end(20) if o.delta is not None])
    assert found == [[0, 0], [8, 0]]
