"""Which tokens are drafted, when drafts are expected to pay, and what rejected drafts cost."""

import random

import pytest

from slora.core.request import TenantShare
from slora.scheduler.draft_state import AcceptanceHistory, NgramIndex, copy_from
from slora.scheduler.sequence import Sequence
from tests.support.scheduler_bench import COSTS, STOP_TOKEN, SchedulerBench


def make_bench(choose: object = lambda sequence: 1, **options: object) -> SchedulerBench:
    defaults = {"num_pages": 100, "max_num_seqs": 32, "max_num_batched_tokens": 64, "prompt_lookup_tokens": 8}
    return SchedulerBench({}, choose=choose, **{**defaults, **options})  # type: ignore[arg-type]


def num_drafted(bench: SchedulerBench) -> int:
    return sum(len(chunk.drafts) for chunk in bench.last_plan.chunks)


def find_plainly(tokens: list[int], size: int) -> int | None:
    ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
    return ends[-1] if len(tokens) >= size and ends else None


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_the_index_finds_the_last_earlier_occurrence_of_the_longest_ngram(limit: int) -> None:
    rng, index, tokens = random.Random(limit), NgramIndex(), [1]
    for _ in range(300):
        tokens.append(rng.randrange(3))
        while index.extend(tokens, limit):
            pass
        expected = [(rank, find_plainly(tokens, size)) for rank, size in enumerate((4, 2))]
        found = next(((rank, end) for rank, end in expected if end is not None), None)
        assert index.find(tokens) == found


def test_a_copy_that_reaches_the_end_repeats_what_it_has_copied() -> None:
    assert copy_from([5, 6, 7], 1, 5) == [6, 7, 6, 7, 6]
    assert copy_from([5, 6, 7], 0, 2) == [5, 6]


def test_a_sequence_that_repeats_itself_gains_several_tokens_in_a_step() -> None:
    bench = make_bench()
    bench.add("r", prompt=4, max_tokens=60)
    outputs = list(bench.run_to_end(9))
    deltas = [output.delta for output in outputs if output.delta is not None]
    assert sum(len(delta.token_ids) for delta in deltas) == 60 and len(deltas) < 15
    drafting = bench.scheduler.drafting
    assert drafting.num_accepted_tokens == drafting.num_draft_tokens == 60 - len(deltas)


def test_drafts_are_not_made_where_a_step_takes_as_long_as_its_rows() -> None:
    """With rows that cost a tenth of a step, the drafts end at about forty rows."""
    for num_others, is_drafted in ((0, True), (60, False)):
        bench = make_bench(max_num_seqs=80, max_num_batched_tokens=200, num_pages=2000)
        for number in range(num_others):
            bench.add(f"other {number}", tokens=[number + 2], max_tokens=60)
        bench.add("r", prompt=6, max_tokens=60)
        drafted = []
        for _ in range(6):
            bench.step()
            drafted.append(num_drafted(bench))
        assert any(drafted) == is_drafted


def test_drafts_of_one_sequence_lengthen_the_step_of_others_by_at_most_a_quarter() -> None:
    choices = random.Random(0)

    def choose(sequence: Sequence) -> int:
        return 1 if sequence.request.request_id == "copies" else choices.randrange(2, 10**9)

    bench = make_bench(choose)
    for name in ("copies", "a", "b", "c"):
        bench.add(name, prompt=4, max_tokens=60)
    step_s, most = COSTS.step_s + 4 * COSTS.decode_s, 0
    for _ in range(20):
        bench.step()
        most = max(most, num_drafted(bench))
    assert 0 < most * COSTS.decode_s <= 0.25 * step_s + 1e-4


def test_drafts_that_are_rejected_become_rare_and_are_charged() -> None:
    """The last two tokens of the sequence have always occurred before, and what followed never comes again."""
    tokens = iter([token for number in range(10, 400) for token in (1, 2, number)])
    bench = make_bench(lambda sequence: next(tokens), num_pages=200)
    sequence = bench.add("r", tokens=[1, 2, 9], max_tokens=600, longest=700)
    drafted = []
    for _ in range(600):
        if sequence.is_finished:
            break
        bench.step()
        drafted.append(num_drafted(bench))
    drafting = bench.scheduler.drafting
    assert drafting.num_rejected_tokens > 0
    assert sum(drafted[:100]) > sum(drafted[-100:]) and sum(drafted[-100:]) <= 40
    assert sequence.tenant.service == 3 + 2 * 600 + drafting.num_rejected_tokens
    assert bench.usage["r"].generated_tokens == 600


def test_drafts_only_take_what_the_step_has_left() -> None:
    for options, most in (
        ({"max_num_seqs": 3}, 2),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 5}, 3),
        ({"num_pages": 3}, 8),  # two of three pages are used when the answer begins
        ({"prompt_lookup_tokens": 1}, 1),
        ({"prompt_lookup_tokens": 0}, 0),
    ):
        bench = make_bench(**options)
        sequence = bench.add("r", prompt=3, max_tokens=8)
        drafted = [0]
        while not sequence.is_finished:
            bench.step()
            drafted.append(num_drafted(bench))
        assert max(drafted) <= most and (max(drafted) > 0) == (most > 0)
        assert bench.scheduler.num_preemptions == 0


def test_drafts_of_two_sequences_together_stay_below_the_ceiling_of_their_tenant() -> None:
    """Each draft had a page of its own within the ceiling, but both together exceeded it."""
    bench = make_bench()
    share = TenantShare(max_share=0.06)
    sequences = [bench.add(name, prompt=4, max_tokens=13, share=share) for name in "ab"]
    tenant, held = sequences[0].tenant, []
    while not all(sequence.is_finished for sequence in sequences):
        bench.step()
        held.append(tenant.num_pages)
    assert tenant.max_pages == 6 == max(held) and bench.scheduler.drafting.num_draft_tokens > 0


def test_a_stop_token_is_never_drafted_because_nothing_follows_it() -> None:
    """It was charged as a rejected draft even where the model sampled it."""
    answer = iter([5, 6, 7, STOP_TOKEN])
    bench = make_bench(lambda sequence: next(answer))
    sequence = bench.add("r", tokens=[5, 6, 7, STOP_TOKEN, 9, 8], max_tokens=20)
    outputs = list(bench.run_to_end(9))
    deltas = [output.delta for output in outputs if output.delta is not None]
    assert [token for delta in deltas for token in delta.token_ids] == [5, 6, 7, STOP_TOKEN]
    assert deltas[-1].finish_reason == "stop" and len(deltas) == 3
    drafting = bench.scheduler.drafting
    assert (drafting.num_draft_tokens, drafting.num_rejected_tokens) == (1, 0)
    assert sequence.tenant.service == 6 + 2 * 4


def test_rates_of_adapters_are_bounded_and_separate_for_each_tenant() -> None:
    history = AcceptanceHistory()
    mine = history.find("tenant", ())
    mine[0].count(0, 50)
    assert history.find("tenant", ()) is mine and history.find("other", ())[0].value == 0.5
    for number in range(2000):
        history.find(f"tenant {number}", ())
    assert history.find("tenant", ()) is not mine


def test_background_sequences_get_drafts_only_while_no_interactive_sequence_runs() -> None:
    """Background work may lengthen the steps of interactive requests by a few percent only."""
    bench = make_bench(lambda sequence: 1 if sequence.is_background else None)
    sequence = bench.add("night", prompt=4, max_tokens=60, is_background=True)
    drafted = []
    for _ in range(6):
        bench.step()
        drafted.append(num_drafted(bench))
    assert max(drafted) > 0
    chunks = bench.last_plan.chunks
    day = make_bench().add("day", prompt=4, max_tokens=60)
    bench.last_plan.chunks[:] = [
        chunk._replace(num_tokens=1, drafts=(), start=len(sequence.token_ids) - 1) for chunk in chunks
    ]
    bench.last_plan.add(day, 4)
    bench.scheduler.drafting.add_drafts(bench.last_plan)
    assert num_drafted(bench) == 0
