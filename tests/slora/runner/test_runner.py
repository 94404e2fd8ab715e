"""The runner executes the moves of a plan in an order that loses no data."""

import pytest
import torch

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.memory.residency import AdapterLoad, Resident
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.step_plan import StepPlan
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from tests.support.cpu_kernels import MOSTLY_FASTEST
from tests.support.driving import Answer, drive, make_engine, make_source, start_engine, step
from tests.support.model_kit import Kits
from tests.support.poison import poison


def test_pages_are_swapped_out_before_their_space_is_reused(kits: Kits) -> None:
    """One plan swaps a page out, copies to it, swaps in over the copy's source and loads an adapter over it."""
    kit = kits("llama")
    engine, _ = start_engine(kit, 300)
    runner, shape = engine.runner, engine.info.shape
    packed = pack(read_adapter(kit.adapters["odd_rank"], shape, AdapterLimits()), shape, "float32")
    memory = runner.memory
    for page in range(8):
        memory.pages[page] = page
    memory.host_pages[3].fill_(30)
    adapter_pages = [1, *range(100, 100 + -(-len(packed.buffer) // runner.full_page_bytes) - 1)]
    resident = Resident(
        AdapterVersion("t", "moves"),
        TenantAccount("t"),
        0,
        1,
        adapter_pages,
        packed.layout.num_bytes,
        packed.layout.targets,
    )
    plan = StepPlan(
        swaps_out=[(5, 0), (6, 1)],
        copies=[(4, 5), (1, 7)],
        swaps_in=[(3, 4), (0, 6)],
        loads=[AdapterLoad(resident, packed, 0, len(adapter_pages))],
    )
    assert runner.run(plan) == []
    assert [memory.host_pages[n][0].item() for n in (0, 1)] == [5, 6]
    assert memory.pages[4:8, 0].tolist() == [30, 4, 5, 1]
    assert torch.equal(memory.pages[1], torch.from_numpy(packed.buffer[: runner.full_page_bytes].copy()))


def move_out_and_in(engine: Engine, plans: list[StepPlan]) -> None:
    """Swaps all held KV out to the host, and swaps it in to other pages in another order."""
    sequences, paging = engine.scheduler.batch, engine.scheduler.paging
    pages = [page for sequence in sequences for page in sequence.blocks.held_pages]
    host_pages = range(len(pages))
    targets = paging.pool.allocate(len(pages), paging.tenants.find("t"))
    plans.append(StepPlan(swaps_out=list(zip(pages, host_pages, strict=True))))
    plans.append(StepPlan(swaps_in=list(zip(host_pages, reversed(targets), strict=True))))
    moved = dict(zip(pages, reversed(targets), strict=True))
    for sequence in sequences:
        held = sequence.blocks.held_pages
        paging.kv.release(held)
        sequence.blocks.num_pages = 0
        sequence.blocks.extend([moved[page] for page in held])


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_an_answer_continues_bit_for_bit_after_a_swap(kits: Kits, kernels: str) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
    requests = [
        EngineRequest(str(n), "t", list(range(3, 30 + 7 * n)), single_adapter(version), params)
        for n, version in enumerate([None, *list(versions.values())[:3]])
    ]

    def run(*, moves: bool) -> list[tuple[list[int], list[float]]]:
        engine = make_engine(kit, source, 400, kernels=kernels)
        poison(engine)
        answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            engine.add(request)
        for _ in range(15):
            step(engine, answers)
        plans: list[StepPlan] = []
        if moves:
            move_out_and_in(engine, plans)
            assert len(plans[0].swaps_out) >= 12
        for plan in plans:
            engine.runner.run(plan)
            engine.runner.memory.pages[engine.scheduler.paging.pool.free_pages] = 0xFF
        rest = drive(engine, [])
        return [
            (answers[name].token_ids + rest[name].token_ids, answers[name].logprobs + rest[name].logprobs)
            for name in answers
        ]

    assert run(moves=True) == run(moves=False)


def test_swap_space_follows_from_the_settings(kits: Kits, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = kits("llama")
    source, _ = make_source(kit)

    def pages(**settings: int | str) -> int:
        runner = make_engine(kit, source, 200, **settings).runner
        assert len(runner.memory.host_pages) == runner.num_swap_pages
        return runner.num_swap_pages

    assert pages() == 50
    assert pages(preemption="swap") == 50
    assert pages(preemption="recompute") == 0
    assert pages(swap_bytes=0) == 0
    assert pages(swap_bytes=kit.pool_bytes(7) + 1) == 7
    monkeypatch.setattr(
        "slora_kernels.machine_limits.MachineLimits.free_memory_bytes", lambda _: kit.pool_bytes(40)
    )
    assert pages() == 10, "more than a quarter of the free memory"
