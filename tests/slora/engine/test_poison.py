"""Before each step, every free page of the pool and of the host is filled with NaN. No answer changes."""

import random

import pytest

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.memory.tenant_account import TenantAccount
from slora.runner.runner import RunningStep
from slora.scheduler.step_plan import StepPlan
from slora_adapters.version import AdapterVersion
from tests.support.cpu_kernels import KERNELS
from tests.support.driving import Answer, drive, make_engine, make_source, step
from tests.support.model_kit import Kits
from tests.support.poison import poison
from tests.support.tiny_models import VOCAB_SIZE


def ask(name: str, adapter: AdapterVersion | None, length: int, max_tokens: int, n: int = 1) -> EngineRequest:
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0 if n == 1 else 1.0, n=n, seed=7, ignore_eos=True, logprobs=0
    )
    return EngineRequest(name, "t", prompt, single_adapter(adapter), params)


class HostPages:
    """Stands in for the host page allocator. It has only what the poison reads."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        pytest.param("llama", KERNELS, marks=pytest.mark.soak),
        ("mistral_window", KERNELS),
        pytest.param("gpt2", KERNELS, marks=pytest.mark.soak),
        pytest.param("llama", "torch", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.soak)])
def test_free_pages_are_never_read(kits: Kits, model: str, dtype: str, kernels: str) -> None:
    """The pool is small and the answers are long. Pages change owners all the time; sequences fork, are preempted
    and resume."""
    kit = kits(model)
    source, versions = make_source(kit, dtype)
    rng = random.Random(5)
    adapters = [None, *list(versions.values())[:3]] * 2
    requests = [
        ask(str(n), one, rng.randint(1, 40), rng.randint(20, 70), 1 + n % 3) for n, one in enumerate(adapters)
    ]
    arrivals = [requests[n : n + 2] for n in range(0, len(requests), 2)]

    def run(*, poisoned: bool) -> dict[str, tuple[list[int], list[float]]]:
        pool_bytes = kit.pool_bytes(42, dtype=dtype)
        engine = make_engine(kit, source, 0, kernels=kernels, dtype=dtype, pool_bytes=pool_bytes)
        if poisoned:
            poison(engine)
        answers = drive(engine, arrivals)
        assert all(answer.error is None for answer in answers.values())
        assert engine.stats().preemptions + engine.stats().adapter_evictions > 0, "no page changed hands"
        return {name: (one.token_ids, one.logprobs) for name, one in answers.items()}

    assert run(poisoned=True) == run(poisoned=False)


def start(kits: Kits) -> tuple[Engine, dict[str, Answer]]:
    kit = kits("llama")
    engine = make_engine(kit, make_source(kit)[0], 100, kernels=KERNELS)
    answers = {"r": Answer()}
    engine.add(ask("r", None, 20, 30))
    step(engine, answers)
    return engine, answers


def test_poisoning_detects_a_read_of_a_free_page(kits: Kits) -> None:
    engine, answers = start(kits)
    poison(engine)
    step(engine, answers)
    assert answers["r"].error is None
    (sequence,) = engine.scheduler.batch
    launch, pool, page = engine.runner.launch, engine.scheduler.paging.pool, sequence.blocks.held_pages[0]

    def launch_without_the_page(plan: StepPlan) -> RunningStep:
        pool.release([page])
        running = launch(plan)
        assert pool.allocate(1, sequence.tenant) == [page]
        return running

    engine.runner.launch = launch_without_the_page  # type: ignore[method-assign]
    step(engine, answers)
    assert "not finite" in str(answers["r"].error)


def test_poisoning_spares_the_free_pages_that_a_plan_still_reads(kits: Kits) -> None:
    """A page that is swapped out is already free when its step runs. So is the host page of a swap-in."""
    engine, _ = start(kits)
    memory = engine.runner.memory
    poison(engine)
    leaving, source, target, coming = pages = engine.scheduler.paging.pool.allocate(4, TenantAccount("t"))
    for number, page in enumerate(pages):
        memory.pages[page] = number
    for host_page in (1, 2, 3):
        memory.host_pages[host_page].fill_(10 * host_page)
    engine.scheduler.paging.pool.release([leaving, source])
    engine.runner.run(StepPlan(swaps_out=[(leaving, 1)], copies=[(source, target)], swaps_in=[(2, coming)]))
    assert memory.pages[[target, coming], 0].tolist() == [1, 20]
    assert [memory.host_pages[n][0].item() for n in (1, 3)] == [0, 0xFF]
    engine.step()
    assert memory.pages[[leaving, source]].unique().tolist() == [0xFF]
    assert memory.host_pages[2].unique().tolist() == [0xFF]
    assert memory.pages[[target, coming], 0].tolist() == [1, 20]
