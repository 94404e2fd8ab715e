"""An answer does not depend on old contents of the pool, nor on other requests in the same step."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slora.core.errors import DeviceFailed, RequestFailed
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.memory.residency import AdapterLoad, Resident
from slora.memory.tenant_account import TenantAccount
from slora.models.step_batch import StepBatch
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from slora_kernels.batch import TileLimits
from tests.support.cpu_kernels import KERNELS, MOSTLY_FASTEST
from tests.support.driving import Answer, add_overflowing_adapter, drive, make_engine, make_source, step
from tests.support.model_kit import ModelKit
from tests.support.poison import poison
from tests.support.tiny_models import VOCAB_SIZE

Kits = Callable[[str], ModelKit]


def ask(name: str, adapter: AdapterVersion | None, length: int = 5, max_tokens: int = 20) -> EngineRequest:
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    return EngineRequest(name, "t", prompt, single_adapter(adapter), params)


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        ("bfloat16", KERNELS),
        pytest.param("float32", KERNELS, marks=pytest.mark.soak),
        pytest.param("float32", "torch", marks=pytest.mark.soak),
    ],
)
def test_the_previous_content_of_a_page_does_not_change_any_answer(
    kits: Kits, kernels: str, dtype: str
) -> None:
    """Runs the same steps over pages that held zeros and over pages that held NaN. The logits are equal bit for bit."""
    kit = kits("llama")
    source, versions = make_source(kit, dtype)
    rng = random.Random(3)
    adapters = [None, *versions.values()] * 3
    requests = [ask(str(n), one, rng.randint(1, 40), rng.randint(1, 40)) for n, one in enumerate(adapters)]
    arrivals = [requests[n : n + 2] for n in range(0, len(requests), 2)]

    def run(byte: int) -> list[tuple[str, list[int], list[float]]]:
        pool_bytes = kit.pool_bytes(40, dtype=dtype)
        engine = make_engine(kit, source, 0, kernels=kernels, dtype=dtype, pool_bytes=pool_bytes)
        poison(engine, byte)
        answers = drive(engine, arrivals)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.adapter_evictions > 0
        assert all(answer.error is None for answer in answers.values())
        return [(name, one.token_ids, one.logprobs) for name, one in answers.items()]

    assert run(0xFF) == run(0)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_a_block_behind_all_windows_is_never_read(kits: Kits, kernels: str) -> None:
    """The freed block keeps its entry in the block table. If a kernel read it, 0 * NaN would give NaN."""
    kit = kits("mistral_window")
    source, versions = make_source(kit)
    requests = [
        ask(str(n), one, 20 * n + 1, 60) for n, one in enumerate([None, *list(versions.values())[:2]])
    ]

    def run(byte: int) -> list[tuple[list[int], list[float]]]:
        engine = make_engine(kit, source, 60, kernels=kernels, max_num_batched_tokens=9, max_num_seqs=4)
        poison(engine, byte)
        answers = drive(engine, [requests])
        return [(one.token_ids, one.logprobs) for one in answers.values()]

    answers = run(0xFF)
    assert answers == run(0)
    assert all(len(tokens) == 60 for tokens, _ in answers)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_an_adapter_that_overflows_fails_its_own_requests_alone(
    kits: Kits, tmp_path: Path, kernels: str
) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    bursting = add_overflowing_adapter(source, "llama", tmp_path)
    others = [ask("base", None), *(ask(kind, version) for kind, version in versions.items())]
    expected = drive(make_engine(kit, source, 500, kernels=kernels), [others])
    answers = drive(make_engine(kit, source, 500, kernels=kernels), [[ask("bursting", bursting), *others]])
    broken = answers.pop("bursting")
    assert isinstance(broken.error, RequestFailed) and bursting.digest in str(broken.error)
    assert not broken.token_ids
    assert {name: one.token_ids for name, one in answers.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


def test_two_tenants_with_the_same_bytes_have_pages_of_their_own(kits: Kits) -> None:
    kit = kits("llama")
    source, _ = make_source(kit)
    path = kit.adapters["odd_rank"]
    mine, yours = source.add(path, "mine"), source.add(path, "yours")
    assert mine.digest == yours.digest
    engine = make_engine(kit, source, 500)
    drive(engine, [[ask("a", mine), ask("b", yours)]])
    first, second = (
        engine._scheduler.paging.residency.find(mine),
        engine._scheduler.paging.residency.find(yours),
    )
    assert first is not None and second is not None and not set(first.pages) & set(second.pages)


def move_another_in(engine: Engine, kit: ModelKit, slot: int) -> None:
    """Simulates a forbidden change: the slot of a running request gets another adapter."""
    shape = engine.info.shape
    packed = pack(read_adapter(kit.adapters["rslora"], shape, AdapterLimits()), shape, "float32")
    num_pages = -(-packed.layout.num_bytes // engine.info.full_page_bytes)
    pages = engine._scheduler.paging.pool.allocate(num_pages, TenantAccount("t"))
    resident = Resident(
        AdapterVersion("t", "other"),
        TenantAccount("t"),
        slot,
        1 << 40,
        pages,
        packed.layout.num_bytes,
        packed.layout.targets,
    )
    engine._runner.memory.load(AdapterLoad(resident, packed, 0, len(pages)))
    engine._scheduler.paging.pool.release(pages)


def test_a_plan_for_an_adapter_that_lost_its_slot_is_never_computed(kits: Kits) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 500)
    engine.add(ask("a", versions["odd_rank"]))
    answers: dict[str, Answer] = {"a": Answer()}
    while not answers["a"].token_ids:
        step(engine, answers)
    resident = engine._scheduler.paging.residency.find(versions["odd_rank"])
    assert resident is not None
    move_another_in(engine, kit, resident.slot)

    plan = engine._scheduler.schedule()
    with pytest.raises(RuntimeError, match=f"slot {resident.slot} no longer holds the adapter"):
        StepBatch.build(plan, engine._runner.memory, TileLimits(16))


def break_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[StepBatch], bool]
) -> None:
    """The forward pass raises for every batch that `is_broken` accepts, as a kernel would for an input that it can't
    compute."""
    model = engine._runner._model
    forward = model.forward

    def break_or_compute(batch: StepBatch, *rest: Any) -> torch.Tensor:
        if is_broken(batch):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(batch, *rest)

    monkeypatch.setattr(model, "forward", break_or_compute)


def test_a_request_that_breaks_its_steps_fails_alone_and_the_others_are_answered(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a fault: one request that broke a step ended all requests of that step."""
    kit = kits("llama")
    source, versions = make_source(kit)
    others = [ask("base", None), *(ask(kind, version) for kind, version in versions.items())]
    expected = drive(make_engine(kit, source, 500), [others])
    engine = make_engine(kit, source, 500)
    length = 17
    break_forward(engine, monkeypatch, lambda batch: int(batch.attention.max_query_len) == length)
    answers = drive(engine, [[ask("culprit", None, length), *others]])
    culprit = answers.pop("culprit")
    assert isinstance(culprit.error, RequestFailed) and not culprit.token_ids
    assert {name: one.token_ids for name, one in answers.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


def test_a_lost_device_ends_the_engine(kits: Kits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Born from a fault: after a sticky device error every later step failed, and the engine went on."""
    kit = kits("llama")
    engine = make_engine(kit, make_source(kit)[0], 100)
    engine.add(ask("a", None))
    engine.step()
    break_forward(engine, monkeypatch, lambda batch: True)
    with pytest.raises(DeviceFailed, match="cpu no longer computes: RuntimeError: CUDA error"):
        engine.step()


def test_a_slot_that_holds_another_adapter_ends_the_requests_of_that_slot_alone(kits: Kits) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 500)
    before = drive(engine, [[ask("a", versions["odd_rank"])]])["a"]
    resident = engine._scheduler.paging.residency.find(versions["odd_rank"])
    assert resident is not None
    move_another_in(engine, kit, resident.slot)

    answers = drive(engine, [[ask("a", versions["odd_rank"]), ask("b", None)]])
    assert isinstance(answers["a"].error, RequestFailed) and answers["b"].error is None

    engine.remove_adapter(versions["odd_rank"])
    source, versions = make_source(kit)
    engine._scheduler.adapters._host._source = source
    assert drive(engine, [[ask("a", versions["odd_rank"])]])["a"].token_ids == before.token_ids


def test_rows_of_the_base_are_in_no_tile(kits: Kits) -> None:
    kit = kits("llama")
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 500)
    names = ["base", "odd_rank", "other base", "rslora"]
    for name in names:
        engine.add(ask(name, versions.get(name), length=20))
    plan = engine._scheduler.schedule()
    for load in plan.loads:
        engine._runner.memory.load(load)
    batch = StepBatch.build(plan, engine._runner.memory, TileLimits(16))
    (layer,) = batch.lora
    covered = torch.zeros(len(batch.token_ids), dtype=torch.int)
    for _, first, count in layer.tiles.tolist():
        assert count <= 16
        covered[first : first + count] += 1
    owners = [chunk.slots for chunk in plan.chunks for _ in range(chunk.num_tokens)]
    assert covered.tolist() == [len(slots) for slots in owners]
