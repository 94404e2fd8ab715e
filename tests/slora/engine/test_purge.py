"""Purging a tenant leaves none of its bytes in free memory, and changes no answer of another tenant."""

import random
from collections import defaultdict

import pytest

from slora.core.errors import RequestFailed
from slora.core.request import EngineRequest, TenantShare, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from tests.support.cpu_kernels import KERNELS
from tests.support.driving import Answer, drive, make_engine, make_source, step
from tests.support.model_kit import Kits, ModelKit
from tests.support.tiny_models import VOCAB_SIZE


def ask(name: str, tenant: str, adapter: AdapterVersion | None, max_tokens: int = 20) -> EngineRequest:
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tenant, prompt, single_adapter(adapter), params)


class Case:
    """An engine with a small pool, and one adapter of each of two tenants."""

    def __init__(self, kit: ModelKit, **settings: str) -> None:
        self.source, versions = make_source(kit)
        kind, version = next(iter(versions.items()))
        shape, limits = self.source.shape, self.source.limits
        adapter = read_adapter(kit.adapters[kind], shape, limits)
        self.own = self.source.hold(adapter, tenant="leaver")
        self.other = self.source.hold(adapter, tenant="stayer")
        assert self.own.digest == version.digest
        self.engine = make_engine(kit, self.source, 60, kernels=KERNELS, **settings)

    def num_nonzero_pages(self) -> int:
        return int((self.memory.pages != 0).any(dim=1).sum())

    @property
    def memory(self):  # type: ignore[no-untyped-def]
        return self.engine.runner.memory


def run_half(engine: Engine, *requests: EngineRequest) -> dict[str, Answer]:
    answers: dict[str, Answer] = defaultdict(Answer)
    for request in requests:
        engine.add(request)
    for _ in range(5):
        step(engine, answers)
    return answers


def test_all_pages_of_a_lone_tenant_are_zero_after_its_purge(kits: Kits) -> None:
    """Those of its running requests, its idle adapter, its prefixes, and those that it freed before."""
    case = Case(kits("llama"))
    case.memory.pages.zero_()  # what the engine has written at its start
    drive(case.engine, [[ask("done", "leaver", case.own), ask("base", "leaver", None)]])
    run_half(case.engine, ask("running", "leaver", case.own), ask("waiting", "leaver", None))
    assert case.num_nonzero_pages() > 5
    purge, ended = case.engine.purge_tenant("leaver")
    assert {output.request_id for output in ended} == {"running", "waiting"}
    assert all(isinstance(output.error, RequestFailed) for output in ended)
    assert (purge.num_requests, purge.num_adapters) == (2, 1) and purge.num_pages > 5
    case.engine.check_invariants()
    assert case.num_nonzero_pages() == 0
    stats = case.engine.stats()
    assert (stats.pages_free, stats.running, stats.waiting) == (stats.pages_total, 0, 0)
    again, ended = case.engine.purge_tenant("leaver")
    assert (again.num_requests, again.num_adapters, again.num_pages, ended) == (0, 0, 0, [])


def test_a_purge_changes_no_answer_of_another_tenant(kits: Kits) -> None:
    requests = [ask("a", "stayer", None), ask("b", "stayer", None)]

    def run(*, purges: bool) -> dict[str, list[int]]:
        case = Case(kits("llama"))
        asked = [*requests, ask("c", "stayer", case.other)]
        answers = run_half(case.engine, *asked, ask("own", "leaver", case.own))
        if purges:
            case.engine.purge_tenant("leaver")
        while case.engine.num_unfinished:
            step(case.engine, answers)
        case.engine.check_invariants()
        hits = case.engine.stats().prefix_hits
        drive(case.engine, [[ask("a", "stayer", None)]])
        assert case.engine.stats().prefix_hits > hits, "the prefixes of the other tenant are still there"
        return {request.request_id: answers[request.request_id].token_ids for request in asked}

    assert run(purges=True) == run(purges=False)


def test_swapped_kv_and_loads_in_progress_are_purged(kits: Kits) -> None:
    case = Case(kits("llama"), preemption="swap")
    case.memory.pages.zero_()
    answers: dict[str, Answer] = defaultdict(Answer)
    for number in range(8):
        case.engine.add(ask(f"r{number}", "leaver", case.own, 90))
    while not case.engine.stats().swap_pages_used:
        step(case.engine, answers)
    host_pages = case.memory.host_pages
    case.engine.purge_tenant("leaver")
    case.engine.check_invariants()
    assert case.num_nonzero_pages() == 0 and case.engine.stats().swap_pages_used == 0
    assert not any(host_pages[page].any() for page in range(len(host_pages)))


def test_the_floor_of_a_purged_tenant_is_free_for_others(kits: Kits) -> None:
    case = Case(kits("llama"))
    drive(case.engine, [[ask("a", "stayer", None)]])
    case.engine.prewarm(case.own, TenantShare(min_share=0.5))
    tenants = case.engine.scheduler.paging.tenants
    stayer = tenants.find("stayer")
    assert tenants.page_limit(stayer) == 30
    case.engine.purge_tenant("leaver")
    assert tenants.page_limit(stayer) == 60
    case.engine.check_invariants()


@pytest.mark.parametrize("prefix_cache", ["public"])
def test_with_a_public_cache_the_blocks_of_the_base_model_stay(kits: Kits, prefix_cache: str) -> None:
    case = Case(kits("llama"), prefix_cache=prefix_cache)
    drive(case.engine, [[ask("base", "leaver", None)]])
    num_cached = case.engine.stats().pages_cached
    case.engine.purge_tenant("leaver")
    case.engine.check_invariants()
    assert case.engine.stats().pages_cached == num_cached > 0
