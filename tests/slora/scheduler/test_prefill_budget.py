"""Prefills and decode rows of one tenant delay the tokens and the prompts of other tenants only a little."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

from slora.core.request import TenantShare
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora.scheduler.budgets import ABSENT_STEPS, PrefillBudget, short_prefill_s
from slora.scheduler.sequence import Sequence
from slora.scheduler.waiting_queues import FairQueue
from tests.support.scheduler_bench import COSTS, SchedulerBench

# A step may prefill 400 tokens in the time of two fixed costs.
SLOW_STEPS = replace(COSTS, step_s=0.2, token_s=0.001)


def make_bench(**options: object) -> SchedulerBench:
    sizes = {"num_pages": 3000, "max_num_batched_tokens": 1000}
    return SchedulerBench({}, **sizes | {"costs": SLOW_STEPS} | options)


def test_a_long_prompt_is_computed_in_short_steps_beside_rows_of_another_tenant() -> None:
    bench = make_bench()
    bench.add("chat", tenant="honest", max_tokens=50)
    bench.step()
    bench.add("long", tenant="other", prompt=900)
    bench.step()
    assert bench.planned == {"chat": 1, "long": 400}
    bench.add("own", tenant="honest", prompt=500)
    bench.step()
    # Its own row waits for it, and the row of nobody else. The other tenant's prompt leaves half of its limit.
    assert bench.planned == {"chat": 1, "long": 200, "own": 500}


def test_no_part_of_a_long_prompt_takes_longer_than_its_first_one() -> None:
    """Born from a bug: each step computed as many tokens, and those with a context of 6,000 took five times as long."""
    costs = replace(SLOW_STEPS, prefill_context_s=2e-6)
    bench = make_bench(costs=costs, num_pages=4000)
    bench.add("chat", tenant="honest", max_tokens=200)
    bench.step()
    long = bench.add("long", tenant="other", prompt=6000, max_tokens=2)
    taken = []
    while long.num_computed < 6000:
        bench.step()
        assert bench.planned["chat"] == 1
        taken.append(bench.planned["long"])
        assert costs.prefill_s(taken[-1], bench.last_plan.chunks[-1].start) < 0.401
    assert 300 < taken[0] < 400 and 25 < taken[-2] < 35


def test_a_prompt_whose_every_token_takes_too_long_still_ends() -> None:
    bench = make_bench(costs=replace(SLOW_STEPS, prefill_context_s=0.1))
    bench.add("chat", tenant="honest", max_tokens=200)
    bench.step()
    long = bench.add("long", tenant="other", prompt=60, max_tokens=2)
    bench.run_steps(61)
    assert long.is_finished


def test_a_tenant_alone_gets_whole_steps() -> None:
    bench = make_bench()
    bench.add("chat", max_tokens=50)
    bench.step()
    bench.add("long", prompt=900)
    bench.step()
    assert bench.planned == {"chat": 1, "long": 900}


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    """It was admitted when the long prompt left tokens of a step, so after its last chunk."""
    bench = make_bench(max_num_batched_tokens=100)
    bench.add("long", tenant="other", prompt=900, max_tokens=2)
    bench.step()
    assert bench.planned == {"long": 100}
    bench.add("short", tenant="honest", prompt=30, max_tokens=2)
    bench.step()
    assert bench.planned == {"long": 50, "short": 30}


def test_a_short_prompt_waits_for_as_little_of_a_long_one_as_a_decode_row_does() -> None:
    """Born from a bug: it shared its first step with half of the token budget."""
    bench = make_bench()
    bench.add("long", tenant="other", prompt=2900, max_tokens=2)
    bench.step()
    assert bench.planned == {"long": 1000}
    bench.add("short", tenant="honest", prompt=30, max_tokens=2)
    bench.add("also long", tenant="other", prompt=900, max_tokens=2)
    bench.step()
    assert bench.planned == {"long": 400, "short": 30}
    bench.step()
    assert bench.planned == {"long": 400, "short": 1}


def test_beside_a_prompt_of_another_tenant_a_long_one_takes_as_long_but_at_most_half_of_the_step() -> None:
    for length, taken in ((30, 200), (300, 300), (450, 450), (900, 500)):
        bench = make_bench(costs=replace(SLOW_STEPS, step_s=0.1))
        bench.add("long", tenant="other", prompt=2900, max_tokens=2)
        bench.step()
        bench.add("short", tenant="honest", prompt=length, max_tokens=2)
        bench.step()
        assert bench.planned == {"long": taken, "short": min(length, 1000 - taken)}


def test_short_prompts_of_many_tenants_start_in_one_step() -> None:
    bench = make_bench(max_num_seqs=30)
    bench.add("long", tenant="other", prompt=2900, max_tokens=2)
    bench.step()
    for number in range(8):
        bench.add(f"short {number}", tenant=f"tenant {number}", prompt=60, max_tokens=2)
    bench.step()
    assert bench.planned == {"long": 400} | {f"short {number}": 60 for number in range(8)}


def test_under_fcfs_a_long_prompt_is_computed_first() -> None:
    bench = make_bench(max_num_batched_tokens=100, scheduling="fcfs")
    bench.add("long", tenant="other", prompt=900, max_tokens=2)
    bench.step()
    bench.add("short", tenant="honest", prompt=30, max_tokens=2)
    bench.step()
    assert bench.planned == {"long": 100}


def test_the_prompts_of_every_tenant_advance_in_every_step() -> None:
    bench = make_bench(max_num_batched_tokens=200)
    tenants = "abcd"
    for name in tenants:
        bench.add(name, tenant=name, prompt=2000, max_tokens=1)
    for _ in tenants:
        bench.step()
    running = [name for name in tenants if name in bench.planned]
    assert len(running) == 4
    for _ in range(5):
        bench.step()
        chunks = bench.planned
        assert sorted(chunks.values()) == [25, 25, 50, 100]


def test_a_tenant_that_used_its_part_leaves_the_rest_to_the_next_one() -> None:
    bench = make_bench(max_num_batched_tokens=100)
    bench.add("first", tenant="many", prompt=900, max_tokens=1)
    bench.step()
    for number in range(3):
        bench.add(f"more {number}", tenant="many", prompt=40)
    bench.add("single", tenant="honest", prompt=40)
    bench.step()
    assert bench.planned == {"first": 50, "single": 40}


def test_a_step_without_room_for_prompts_looks_at_few_of_the_waiting_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looked at each of them, and each look took time for each of them."""
    bench = make_bench(max_num_seqs=200, max_num_batched_tokens=2000)
    for name in ("a chat", "another chat"):
        bench.add(name, tenant=name, max_tokens=500)
    bench.step()
    for number in range(300):
        bench.add(str(number), tenant=f"tenant {number}", prompt=1000)
    peek, looks = FairQueue.peek, Counter[str]()

    def count(queue: FairQueue, *skipped: Collection[TenantAccount]) -> Sequence | None:
        looks["peek"] += 1
        return peek(queue, *skipped)

    monkeypatch.setattr(FairQueue, "peek", count)
    bench.run_steps(10)
    assert 0 < looks["peek"] < 10 * 15


def test_many_tenants_that_wait_make_a_step_longer_for_the_few_that_decode() -> None:
    """A burst of many tenants was computed in as short steps as the prompts of a single one."""
    bench = make_bench(max_num_batched_tokens=4000, max_num_seqs=8)
    bench.add("chat", tenant="honest", max_tokens=50)
    bench.step()
    for number in range(4):
        bench.add(f"many {number}", tenant="many", prompt=300, max_tokens=50)
    bench.step()
    # One tenant waits for each that decodes.
    assert sum(bench.planned.values()) == 1 + 400
    for number in range(20):
        bench.add(f"burst {number}", tenant=f"tenant {number}", prompt=300, max_tokens=50)
    bench.step()
    # Five places are free, and two tenants decode.
    assert sum(bench.planned.values()) == 2 + 2.5 * 400


@pytest.mark.parametrize(("token_s", "seconds"), [(0.0001, 0.4), (0.001, 0.4), (0.02, 0.64)])
def test_a_short_prefill_pays_for_the_fixed_cost_of_its_step(token_s: float, seconds: float) -> None:
    assert short_prefill_s(replace(SLOW_STEPS, token_s=token_s)) == pytest.approx(seconds)


def test_what_is_not_computed_stays_in_the_budget() -> None:
    first, second, third = (TenantAccounts(10).find(name) for name in "abc")
    budget = PrefillBudget(COSTS, 100, 30, {first}, {first, second})
    assert budget.fit(second) == 15
    assert budget.fit(first) == 100
    budget.spend(first, 80)
    assert (budget.fit(second), budget.fit(third), budget.num_tokens) == (15, 20, 20)
    budget.spend(second, 15)
    assert (budget.fit(second), budget.fit(third), budget.num_tokens) == (0, 5, 5)


def test_a_token_that_takes_longer_than_its_part_leaves_other_prompts_theirs() -> None:
    """Born from a bug: nothing was left, and a short prompt waited for all such tokens of another tenant's prompt."""
    chat, long, short = (TenantAccounts(10).find(name) for name in ("chat", "long", "short"))
    costs = replace(COSTS, token_s=0.001, prefill_context_s=1e-6)
    budget = PrefillBudget(costs, 1000, 64, {chat}, {long, short})
    assert budget.fit(long, 100_000) == 1  # It takes as long as 101 tokens without context.
    budget.spend(long, 1, 100_000)
    assert budget.fit(long, 100_001) == 0
    assert budget.fit(short) == 31


# -- decode rows --------------------------------------------------------------------------------------------------


def make_row_bench(**options: object) -> SchedulerBench:
    """A step's fixed cost is the time of 20 rows."""
    costs = replace(COSTS, step_s=0.02, decode_s=0.001, context_token_s=0.0)
    return make_bench(**{"max_num_seqs": 128, "costs": costs} | options)


def count_rows(bench: SchedulerBench) -> Counter[str]:
    """The decode rows of each tenant in the last step."""
    return Counter(chunk.sequence.tenant.name for chunk in bench.last_plan.chunks if chunk.is_decode_row)


def add_rows(bench: SchedulerBench, tenant: str, count: int, **fields: object) -> list[Sequence]:
    return [
        bench.add(f"{tenant} {number}", tenant=tenant, max_tokens=60, **fields) for number in range(count)
    ]


def test_many_rows_of_a_tenant_make_a_step_at_most_twice_as_long_for_another() -> None:
    """Born from a bug: each step of an honest chat computed all 256 beams of another tenant."""
    bench = make_row_bench()
    bench.add("choices", tenant="greedy", n=100, max_tokens=60)
    bench.run_steps(2)
    assert count_rows(bench) == {"greedy": 100}
    chat = bench.add("chat", tenant="honest", prompt=5, max_tokens=8)
    bench.step()
    assert bench.planned["chat"] == 5 and count_rows(bench) == {"greedy": 20}
    for _ in range(7):
        bench.step()
        assert count_rows(bench) == {"greedy": 20, "honest": 1}
    assert chat.is_finished


def test_the_next_request_of_a_tenant_does_not_wait_for_a_step_with_all_rows_of_another() -> None:
    bench = make_row_bench()
    add_rows(bench, "greedy", 100)
    bench.step()
    for number in range(3):
        bench.add(f"chat {number}", tenant="honest", max_tokens=3)
        for _ in range(3 + ABSENT_STEPS):
            bench.step()
            assert count_rows(bench)["greedy"] == 20
    bench.step()
    assert count_rows(bench) == {"greedy": 100}


def test_a_tenant_of_a_later_priority_class_limits_no_rows_when_it_has_just_computed() -> None:
    """Born from a bug: it did not limit them in steps with its work, but in the steps after its last one."""
    bench = make_row_bench()
    add_rows(bench, "first", 50)
    bench.step()
    bench.add("later", tenant="later", max_tokens=2, share=TenantShare(priority=1))
    for _ in range(3 + ABSENT_STEPS):
        bench.step()
        assert count_rows(bench)["first"] == 50


def test_beams_of_a_tenant_are_limited_like_other_rows() -> None:
    bench = make_row_bench()
    for number in range(20):
        bench.add(f"search {number}", tenant="greedy", beams=4, max_tokens=12)
    bench.run_steps(4)
    assert count_rows(bench)["greedy"] > 50
    chat, outputs = bench.add("chat", tenant="honest", max_tokens=30), []
    while not chat.is_finished:
        outputs += bench.step()
        assert count_rows(bench)["greedy"] <= 20
    outputs += bench.run_to_end(30)
    assert len({output.request_id for output in outputs}) == 21


def test_a_row_that_is_left_out_is_computed_before_those_that_were_not() -> None:
    bench = make_row_bench()
    rows = add_rows(bench, "greedy", 100)
    bench.step()
    bench.add("chat", tenant="honest", max_tokens=60)
    for _ in range(2):
        before = [row.num_generated for row in rows]
        bench.run_steps(5)
        assert [row.num_generated - old for row, old in zip(rows, before, strict=True)] == [1] * 100


@pytest.mark.parametrize(
    ("share", "count", "computed"),
    [
        (TenantShare(), 40, 40),
        (TenantShare(weight=2), 60, 30),
        (TenantShare(weight=2), 10, 20),
        (TenantShare(priority=-1), 10, 20),
        (TenantShare(priority=1), 10, 50),
    ],
)
def test_rows_are_limited_by_the_work_of_other_tenants(share: TenantShare, count: int, computed: int) -> None:
    """share, count: of the other tenant. computed: the rows of a tenant of weight 1 that has 50."""
    bench = make_row_bench()
    add_rows(bench, "greedy", 50)
    bench.step()
    add_rows(bench, "other", count, share=share)
    bench.run_steps(3)
    assert count_rows(bench) == {"greedy": computed, "other": count}


def test_all_rows_are_computed_while_another_tenant_waits_in_vain() -> None:
    """It has no pages, so fewer rows would only keep it waiting for longer."""
    bench = make_row_bench(num_pages=64)
    add_rows(bench, "greedy", 50)
    bench.step()
    bench.add("large", tenant="other", prompt=200)
    bench.step()
    assert bench.scheduler.num_waiting == 1 and count_rows(bench) == {"greedy": 50}


def test_a_few_rows_are_always_computed_whatever_a_row_seems_to_cost() -> None:
    """The learned costs had taken the cost of a step for that of a row, and a step with two rows did not correct it."""
    bench = make_row_bench(costs=replace(COSTS, step_s=0.0001, decode_s=0.04))
    add_rows(bench, "greedy", 50)
    bench.step()
    bench.add("chat", tenant="honest", max_tokens=60)
    bench.run_steps(2)
    assert count_rows(bench) == {"greedy": 8, "honest": 1}


def test_under_fcfs_no_row_is_left_out() -> None:
    bench = make_row_bench(scheduling="fcfs")
    add_rows(bench, "greedy", 50)
    bench.step()
    bench.add("chat", tenant="honest", max_tokens=60)
    bench.run_steps(2)
    assert count_rows(bench) == {"greedy": 50, "honest": 1}


def test_a_row_that_is_held_back_leaves_its_token_to_a_prompt() -> None:
    """Otherwise a tenant whose rows fill the steps keeps the prompts of others out."""
    bench = make_row_bench(max_num_seqs=100, max_num_batched_tokens=50)
    add_rows(bench, "greedy", 50)
    bench.step()
    chat = bench.add("chat", tenant="honest", prompt=5, max_tokens=5)
    bench.step()
    assert chat.num_computed > 0 and count_rows(bench) == {"greedy": 20}
