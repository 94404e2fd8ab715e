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
from tests.support.cpu_kernels import MOSTLY_FASTEST
from tests.support.driving import add_overflowing_adapter, drive, make_engine, make_source, start_engine
from tests.support.model_kit import Kits, ModelKit
from tests.support.tiny_models import VOCAB_SIZE


def ask(name: str, adapter: AdapterVersion | None, length: int = 5, max_tokens: int = 20) -> EngineRequest:
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    return EngineRequest(name, "t", prompt, single_adapter(adapter), params)


@pytest.mark.parametrize("kernels", MOSTLY_FASTEST)
def test_an_adapter_that_overflows_fails_its_own_requests_alone(
    kit: ModelKit, tmp_path: Path, kernels: str
) -> None:
    source, versions = make_source(kit)
    bursting = add_overflowing_adapter(source, kit, tmp_path)
    others = [ask("base", None), *(ask(kind, version) for kind, version in versions.items())]
    expected = drive(make_engine(kit, source, 500, kernels=kernels), [others])
    answers = drive(make_engine(kit, source, 500, kernels=kernels), [[ask("bursting", bursting), *others]])
    broken = answers.pop("bursting")
    assert isinstance(broken.error, RequestFailed) and bursting.digest in str(broken.error)
    assert not broken.token_ids
    assert {name: one.token_ids for name, one in answers.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


def test_two_tenants_with_the_same_bytes_have_pages_of_their_own(kit: ModelKit) -> None:
    source, _ = make_source(kit)
    path = kit.adapters["odd_rank"]
    mine, yours = source.add(path, "mine"), source.add(path, "yours")
    assert mine.digest == yours.digest
    engine = make_engine(kit, source, 500)
    drive(engine, [[ask("a", mine), ask("b", yours)]])
    first, second = (
        engine.scheduler.paging.residency.find(mine),
        engine.scheduler.paging.residency.find(yours),
    )
    assert first is not None and second is not None and not set(first.pages) & set(second.pages)


def move_another_in(engine: Engine, kit: ModelKit, slot: int) -> None:
    """Simulates a forbidden change: the slot of a running request gets another adapter."""
    shape = engine.info.shape
    packed = pack(read_adapter(kit.adapters["rslora"], shape, AdapterLimits()), shape, "float32")
    num_pages = -(-packed.layout.num_bytes // engine.info.full_page_bytes)
    pages = engine.scheduler.paging.pool.allocate(num_pages, TenantAccount("t"))
    resident = Resident(
        AdapterVersion("t", "other"),
        TenantAccount("t"),
        slot,
        1 << 40,
        pages,
        packed.layout.num_bytes,
        packed.layout.targets,
    )
    engine.runner.memory.load(AdapterLoad(resident, packed, 0, len(pages)))
    engine.scheduler.paging.pool.release(pages)


def break_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[StepBatch], bool]
) -> None:
    """The forward pass raises for every batch that `is_broken` accepts, as a kernel would for an input that it can't
    compute."""
    model = engine.runner.decoder
    forward = model.forward

    def break_or_compute(batch: StepBatch, *rest: Any) -> torch.Tensor:
        if is_broken(batch):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(batch, *rest)

    monkeypatch.setattr(model, "forward", break_or_compute)


def test_a_request_that_breaks_its_steps_fails_alone_and_the_others_are_answered(
    kit: ModelKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a fault: one request that broke a step ended all requests of that step."""
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
    engine, _ = start_engine(kits("llama"), 100)
    engine.add(ask("a", None))
    engine.step()
    break_forward(engine, monkeypatch, lambda batch: True)
    with pytest.raises(DeviceFailed, match="cpu no longer computes: RuntimeError: CUDA error"):
        engine.step()


def test_a_slot_that_holds_another_adapter_ends_the_requests_of_that_slot_alone(
    kit: ModelKit, caplog: pytest.LogCaptureFixture
) -> None:
    source, versions = make_source(kit)
    engine = make_engine(kit, source, 500)
    before = drive(engine, [[ask("a", versions["odd_rank"])]])["a"]
    resident = engine.scheduler.paging.residency.find(versions["odd_rank"])
    assert resident is not None
    move_another_in(engine, kit, resident.slot)

    answers = drive(engine, [[ask("a", versions["odd_rank"]), ask("b", None)]])
    assert isinstance(answers["a"].error, RequestFailed) and answers["b"].error is None
    assert f"slots [{resident.slot}] no longer hold the adapters" in caplog.text

    engine.remove_adapter(versions["odd_rank"])
    again = source.add(kit.adapters["odd_rank"])
    assert drive(engine, [[ask("a", again)]])["a"].token_ids == before.token_ids
