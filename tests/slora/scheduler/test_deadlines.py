"""A request that cannot get its first token before its deadline is reported once, unless it runs or has its first
token. A beam search gets its first token at its end, so it is reported while it runs, too."""

from slora.core.cost_model import CostModel
from slora.core.request import EngineRequest
from slora.memory.kv_cache import BlockTable
from slora.scheduler.deadlines import Deadlines
from slora.scheduler.lifecycle import UnfinishedRequests
from slora.scheduler.sequence import Sequence
from tests.support.beam_model import beam_params
from tests.support.queueing import BLOCK_TOKENS, make_sequence, make_tenant
from tests.support.scheduler_bench import STOP_TOKEN

TENANT = make_tenant("a")
# The prompts here have two tokens, which take one second.
COSTS = CostModel(
    step_s=0.6, token_s=0.5, decode_s=0.2, context_token_s=0.0, page_copy_s=0.0, load_byte_s=0.0
)


def make_waiting() -> Sequence:
    return make_sequence(TENANT, prompt=2)


def make_deadlines() -> Deadlines:
    return Deadlines(COSTS, UnfinishedRequests())


def make_search(stop_ids: frozenset[int]) -> Sequence:
    """A search of two beams for five tokens. A step of both beams takes one second."""
    params = beam_params(2, 1, 5, 1.0, early_stopping=False)
    return Sequence(
        EngineRequest("r", "a", [1, 1], (), params), TENANT, 5, stop_ids, 0, BlockTable(BLOCK_TOKENS)
    )


def test_the_next_due_time_is_the_earliest_latest_start() -> None:
    deadlines = make_deadlines()
    assert deadlines.next_due_s is None
    deadlines.add(make_waiting(), 6.0)
    deadlines.add(make_waiting(), 4.0)
    assert deadlines.next_due_s == 3.0
    deadlines.pop_missed(3.0)
    assert deadlines.next_due_s == 5.0
    deadlines.pop_missed(5.0)
    assert deadlines.next_due_s is None


def test_a_running_search_with_stop_tokens_misses_its_deadline_only_at_the_deadline() -> None:
    unfinished = UnfinishedRequests()
    deadlines = Deadlines(COSTS, unfinished)
    search = make_search(frozenset([STOP_TOKEN]))
    unfinished.add(search)
    deadlines.add(search, 20.0)
    assert deadlines.next_due_s == 19.0
    search.is_running, search.num_computed = True, 2
    assert deadlines.pop_missed(19.5) == []
    assert deadlines.next_due_s == 20.0
    assert deadlines.pop_missed(20.0) == [search]


def test_a_search_without_stop_tokens_misses_its_deadline_once_too_few_steps_remain() -> None:
    """After the prompt, four of the five steps take a second each."""
    unfinished = UnfinishedRequests()
    deadlines = Deadlines(COSTS, unfinished)
    search = make_search(frozenset())
    unfinished.add(search)
    deadlines.add(search, 20.0)
    assert deadlines.next_due_s == 15.0
    assert deadlines.pop_missed(15.0) == [search]


def test_a_search_lives_in_any_of_its_beams() -> None:
    unfinished = UnfinishedRequests()
    deadlines = Deadlines(COSTS, unfinished)
    search = make_search(frozenset([STOP_TOKEN]))
    beam = search.fork(1)
    unfinished.add(beam)
    search.is_finished = True
    deadlines.add(search, 20.0)
    assert deadlines.pop_missed(20.0) == [beam]
    deadlines.add(search, 20.0)
    unfinished.remove(beam)
    assert deadlines.pop_missed(20.0) == []
