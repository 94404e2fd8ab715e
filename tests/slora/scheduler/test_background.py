"""Background requests fill what interactive requests leave, and never delay them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.cost_model import StepWork
from slora.core.request import StepOutput, TenantShare
from slora.memory.tenant_account import TenantAccounts
from slora.scheduler.budgets import MAX_GROWTH, QUIET_STEPS, BackgroundBudget, LoadBudget
from slora.scheduler.waiting_queues import FairQueue, FifoQueue, WaitingQueue
from slora_adapters.version import AdapterVersion
from tests.support.queueing import make_sequence
from tests.support.scheduler_bench import COSTS, SchedulerBench

ADAPTER, OTHER = AdapterVersion("tenant", "digest"), AdapterVersion("tenant", "other")
THIRD = AdapterVersion("tenant", "third")
# A decode row costs so little that some fit beside interactive rows.
CHEAP_ROWS = replace(COSTS, decode_s=1e-4, context_token_s=0.0)

request = st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["tenant", "other"]))
arrivals = st.lists(st.lists(request, max_size=3), max_size=12)


def make_bench(**options: Any) -> SchedulerBench:
    return SchedulerBench({ADAPTER: 2, OTHER: 2}, **{"num_pages": 20, **options})


def run(
    bench: SchedulerBench,
    interactive: list[list[tuple[int, int, str]]],
    background: list[list[tuple[int, int, str]]],
    share: TenantShare,
) -> list[set[str]]:
    """Adds requests before each step. Returns, for each step, the interactive requests that got a token."""
    steps = []

    def record(outputs: list[StepOutput]) -> None:
        steps.append({one.request_id for one in outputs if one.request_id.startswith("i")})

    for number in range(max(len(interactive), len(background))):
        for kind, groups in (("b", background), ("i", interactive)):
            for index, (prompt, max_tokens, tenant) in enumerate(
                groups[number] if number < len(groups) else ()
            ):
                name = f"{kind}{number}-{index}"
                fields: dict[str, Any] = {"tenant": tenant, "share": share, "is_background": kind == "b"}
                bench.add(name, prompt=prompt, max_tokens=max_tokens, **fields)
        record(bench.step())
    for _ in range(1000):
        if not bench.num_unfinished:
            return steps
        record(bench.step())
    raise AssertionError("a request never ends")


@given(
    arrivals,
    arrivals,
    st.integers(8, 14),
    st.integers(1, 5),
    st.sampled_from(["fair", "fcfs"]),
    st.sampled_from([TenantShare(), TenantShare(max_share=0.8), TenantShare(min_share=0.3)]),
)
def test_interactive_requests_run_in_the_same_steps_with_and_without_background_requests(
    interactive: list[list[tuple[int, int, str]]],
    background: list[list[tuple[int, int, str]]],
    num_pages: int,
    max_num_seqs: int,
    scheduling: str,
    share: TenantShare,
) -> None:
    options = {"num_pages": num_pages, "max_num_seqs": max_num_seqs, "scheduling": scheduling}
    alone = run(make_bench(**options, costs=CHEAP_ROWS), interactive, [], share)
    beside = run(make_bench(**options, costs=CHEAP_ROWS), interactive, background, share)
    assert beside[: len(alone)] == alone and not any(beside[len(alone) :])


def test_a_background_row_joins_interactive_rows_only_if_the_step_hardly_grows() -> None:
    for costs, expected in ((COSTS, {"slow"}), (CHEAP_ROWS, {"slow", "cheap"})):
        bench = make_bench(costs=costs)
        bench.add("cheap", max_tokens=30, is_background=True)
        bench.run_steps(3)
        bench.add("slow", max_tokens=30)
        bench.step()
        assert {output.request_id for output in bench.step()} == expected


def test_a_background_prompt_is_computed_in_small_chunks_beside_interactive_rows() -> None:
    bench = make_bench(costs=replace(COSTS, token_s=1e-4))
    bench.add("chat", max_tokens=30)
    bench.step()
    bench.add("batch", prompt=20, is_background=True)
    bench.step()
    # 3% of a step of 0.011 s is the time of 3 tokens.
    assert bench.planned == {"chat": 1, "batch": 3}


def test_without_interactive_requests_background_requests_fill_the_step() -> None:
    bench = make_bench()
    for name in "abc":
        bench.add(name, prompt=4, is_background=True)
    bench.step()
    assert bench.last_plan.num_tokens == 12


def test_a_step_without_interactive_requests_stays_short() -> None:
    """An interactive request that arrives during the step waits for its end."""
    bench = make_bench(num_pages=200, max_num_batched_tokens=500)
    bench.add("batch", prompt=400, is_background=True)
    bench.step()
    assert bench.last_plan.num_tokens == 64


def test_steps_between_interactive_requests_are_shorter_until_none_comes_any_more() -> None:
    bench = make_bench(num_pages=1000, max_num_batched_tokens=500)
    bench.add("chat", prompt=4, max_tokens=2)
    bench.add("batch", prompt=1500, is_background=True)
    while bench.scheduler.find("chat"):
        bench.step()
    sizes = []
    while len(sizes) < QUIET_STEPS + 2:
        bench.step()
        sizes.append(bench.last_plan.num_tokens)
    assert sizes[: QUIET_STEPS - 1] == [8] * (QUIET_STEPS - 1) and sizes[QUIET_STEPS:] == [64, 64]


def test_background_requests_get_no_time_that_the_token_budget_does_not_have() -> None:
    budget = BackgroundBudget(COSTS, 5, None)
    tenants = TenantAccounts(10)
    sequence = make_sequence(tenants.find("a", is_background=True), prompt=9)
    assert budget.fit(sequence, 9) == 5
    budget.spend(sequence, 5)
    assert budget.fit(sequence, 4) == 0


@pytest.mark.parametrize("scheduling", ["fair", "fcfs"])
def test_a_background_request_is_preempted_so_that_an_interactive_one_is_admitted(scheduling: str) -> None:
    for options in ({"max_num_seqs": 2}, {"num_pages": 6}):
        bench = make_bench(scheduling=scheduling, swap_pages=10, preemption="swap", **options)
        for name in ("early", "late"):
            bench.add(name, prompt=6, max_tokens=6, is_background=True)
        bench.step()
        bench.add("chat", prompt=6, max_tokens=6)
        bench.step()
        assert [chunk.sequence.request.request_id for chunk in bench.last_plan.chunks] == ["chat"]
        assert bench.scheduler.num_preemptions >= 1 and not bench.last_plan.swaps_out
        answers = [one.request_id for one in bench.run_to_end(10) if one.delta and one.delta.finish_reason]
        assert sorted(answers) == ["chat", "early", "late"] and answers[0] == "chat"


def test_no_background_request_is_admitted_while_an_interactive_one_waits_for_pages() -> None:
    bench = make_bench(num_pages=8, costs=CHEAP_ROWS)
    bench.add("first", prompt=16, max_tokens=12)
    bench.step()
    bench.add("second", prompt=16, max_tokens=4)
    bench.add("batch", prompt=1, is_background=True)
    while bench.scheduler.find("second"):
        outputs = bench.step()
        assert "batch" not in {output.request_id for output in outputs}


@pytest.mark.parametrize("scheduling", ["fair", "fcfs"])
def test_a_batch_does_not_use_up_its_tenants_turn(scheduling: str) -> None:
    bench = make_bench(scheduling=scheduling, num_pages=60)
    for number in range(4):
        bench.add(f"b{number}", prompt=10, max_tokens=10, is_background=True)
    list(bench.run_to_end(10))
    tenants = bench.memory.tenants
    assert tenants.find("tenant").service == 0 and tenants.find("tenant", is_background=True).service == 120


def test_batches_of_two_tenants_share_by_weight() -> None:
    bench = make_bench(max_num_seqs=1, num_pages=60)
    for number in range(12):
        for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
            share = TenantShare(weight=weight)
            name = f"{tenant}{number}"
            bench.add(name, prompt=4, max_tokens=4, tenant=tenant, share=share, is_background=True)
    ended = [one.request_id for one in bench.run_to_end(10) if one.delta and one.delta.finish_reason]
    assert sum(name.startswith("heavy") for name in ended[:12]) in (8, 9, 10)


def test_the_floor_of_a_tenant_protects_nothing_of_its_batches() -> None:
    tenants = TenantAccounts(100)
    batch = tenants.find("a", is_background=True)
    tenants.set_share("a", TenantShare(min_share=0.5, max_share=0.6, priority=2))
    chat = tenants.find("a")
    assert (chat.min_pages, chat.max_pages) == (50, 60)
    assert (batch.min_pages, batch.max_pages) == (0, 60)
    assert batch.share.priority > 10**6
    assert tenants.page_limit(batch) == 60 and tenants.page_limit(tenants.find("b")) == 50


def test_pages_of_batches_do_not_count_against_the_shares_of_tenants() -> None:
    tenants = TenantAccounts(100)
    chat, batch, other = tenants.find("a"), tenants.find("b", is_background=True), tenants.find("c")
    chat.num_pages, batch.num_pages, other.num_pages = 45, 30, 10
    assert not tenants.is_over_share(chat) and tenants.is_over_share(batch)


@pytest.mark.parametrize("queue", [FairQueue(), FifoQueue()])
def test_background_sequences_come_last_and_are_preempted_first(queue: WaitingQueue) -> None:
    tenants = TenantAccounts(10)
    batch = make_sequence(tenants.find("a", is_background=True))
    chats = [make_sequence(tenants.find("a")), make_sequence(tenants.find("b"))]
    for sequence in (batch, *chats):
        sequence.tenant.num_pages = 1
        queue.push(sequence)
    assert queue.choose_victim([batch, *chats]) is batch
    for _ in chats:
        first = queue.peek()
        assert first in chats and first is not None
        queue.remove(first)
    assert queue.peek() is batch


def test_loads_for_background_requests_lengthen_interactive_steps_only_a_little() -> None:
    budget = LoadBudget(COSTS, full_page_bytes=100, pool_pages=1000, fixed=None)  # 1e-5 s per page
    budget.begin_step(num_decoding=10, num_waiting=0, is_shared=True)
    assert (budget.num_pages, budget.num_background_pages) == (200, int(1000 * 2 * MAX_GROWTH))
    budget.begin_step(num_decoding=10, num_waiting=0)
    assert budget.num_background_pages == 200


def test_a_load_that_an_interactive_request_joins_gets_the_full_budget() -> None:
    bench = SchedulerBench({ADAPTER: 8}, num_pages=30, costs=replace(COSTS, token_s=1e-4))
    bench.add("chat", max_tokens=40)
    bench.step()
    bench.add("batch", adapter=ADAPTER, is_background=True)
    loaded = []
    for number in range(5):
        bench.source.deliver()
        if number == 3:
            bench.add("other", adapter=ADAPTER)
        bench.step()
        loaded.append(sum(load.num_pages for load in bench.last_plan.loads))
    assert loaded[1:3] == [1, 1] and max(loaded[3:]) > 1, loaded


def test_an_interactive_fetch_takes_the_host_cache_of_a_waiting_background_request() -> None:
    bench = SchedulerBench({ADAPTER: 4, OTHER: 4}, num_pages=30, host_pages=8)
    bench.add("chat", max_tokens=60)
    bench.step()
    bench.add("batch", prompt=8, adapter=ADAPTER, is_background=True)
    bench.deliver_and_step()
    assert not any(chunk.sequence.is_background for chunk in bench.last_plan.chunks)
    bench.add("urgent", adapter=OTHER)
    for _ in range(6):
        bench.step()
        bench.source.deliver()
    assert not bench.scheduler.find("urgent"), "its adapter was never fetched"
    ended = [one.request_id for one in bench.run_to_end(20) if one.delta and one.delta.finish_reason]
    assert ended == ["chat", "batch"]


def test_a_background_request_that_gives_up_its_copies_starts_when_there_is_time_for_it() -> None:
    """It waited forever if an interactive request in the queue kept a copy of the same adapter."""
    bench = SchedulerBench({ADAPTER: 4, OTHER: 4, THIRD: 4}, num_pages=8, host_pages=16)
    bench.add("chat", prompt=16, max_tokens=6)
    bench.step()
    bench.add("batch", adapter=ADAPTER, is_background=True)
    bench.add("other batch", adapter=OTHER, is_background=True)
    bench.add("queued", adapter=ADAPTER)
    for _ in range(2):
        bench.deliver_and_step()
    assert bench.scheduler.num_awaiting_adapter == 0
    bench.add("urgent", adapter=THIRD)
    ended = [one.request_id for one in bench.run_to_end(20) if one.delta and one.delta.finish_reason]
    assert sorted(ended[:3]) == ["chat", "queued", "urgent"]
    assert sorted(ended[3:]) == ["batch", "other batch"]
    assert bench.source.num_fetches[THIRD] == 1 and bench.source.num_pinned == 0


@pytest.mark.parametrize("slow", ["mask", "context"])
def test_a_step_without_interactive_requests_computes_at_least_one_row(slow: str) -> None:
    """A row that took longer than the whole budget was never computed, so its request never ended."""
    sequence = make_sequence(TenantAccounts(10).find("a", is_background=True), prompt=9)
    sequence.append(1)
    sequence.num_computed = 9
    if slow == "mask":
        sequence.mask_s = 1.0
    costs = replace(COSTS, context_token_s=1.0) if slow == "context" else COSTS
    budget = BackgroundBudget(costs, 100, None)
    assert budget.fit(sequence, 1) == 1
    budget.spend(sequence, 1)
    assert budget.fit(sequence, 1) == 0
    work = StepWork(prefill_tokens=0, decode_rows=1, context_tokens=1, swapped_pages=0, loaded_bytes=0)
    assert BackgroundBudget(costs, 100, work).fit(sequence, 1) == 0


def test_a_background_prompt_with_a_long_context_is_computed_in_smaller_parts_and_ends() -> None:
    sequence = make_sequence(TenantAccounts(10).find("a", is_background=True), prompt=9000)
    costs = replace(COSTS, prefill_context_s=1e-6)
    first = BackgroundBudget(costs, 100, None).fit(sequence, 9000)
    sequence.num_computed = 8000
    later = BackgroundBudget(costs, 100, None).fit(sequence, 1000)
    assert costs.prefill_s(later, 8000) <= costs.prefill_s(first + 1) and 0 < later < first / 5
    budget = BackgroundBudget(replace(costs, prefill_context_s=1.0), 100, None)
    assert budget.fit(sequence, 1000) == 1
    budget.spend(sequence, 1)
    assert budget.fit(sequence, 1000) == 0


def test_a_step_to_which_an_interactive_request_is_admitted_loads_little_for_background_requests() -> None:
    budget = LoadBudget(COSTS, full_page_bytes=100, pool_pages=1000, fixed=None)  # 1e-5 s per page
    budget.begin_step(num_decoding=0, num_waiting=0)
    budget.add_sequence(is_background=True)
    assert budget.num_background_pages == 110
    budget.begin_step(num_decoding=0, num_waiting=0)
    budget.add_sequence(is_background=False)
    assert (budget.num_pages, budget.num_background_pages) == (110, int(1000 * 1.1 * MAX_GROWTH))


def test_the_growth_is_measured_against_the_whole_interactive_step() -> None:
    work = StepWork(prefill_tokens=100, decode_rows=0, context_tokens=0, swapped_pages=0, loaded_bytes=0)
    sequence = make_sequence(TenantAccounts(10).find("a", is_background=True), prompt=9)
    # 3% of 0.01 + 100 * 0.001 s are the time of 3.3 tokens.
    assert BackgroundBudget(COSTS, 100, work).fit(sequence, 9) == 3
