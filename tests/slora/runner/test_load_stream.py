"""Loads that run beside a step. The tests check the order of work on the GPU's streams, on a machine that runs it
all at once."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.models.step_batch import StepArrays
from slora.runner.runner import split_loads
from slora.scheduler.step_plan import StepPlan
from tests.support.driving import drive, start_engine
from tests.support.model_kit import Kits, ModelKit


@dataclass
class NotedStream:
    """Runs copies synchronously and records the calls."""

    calls: list[str] = field(default_factory=list)

    def mark(self) -> None:
        self.calls.append("mark")

    def copy(self, work: Callable[[], None]) -> "NotedStream":
        """Returns itself as the event that occurs when the copies are done."""
        self.calls.append("copy")
        work()
        return self

    def synchronize(self) -> None:
        """The copies are done."""

    def wait(self) -> None:
        self.calls.append("wait")


def ask(kit: ModelKit, versions: dict, names: list[str | None]) -> list[list[EngineRequest]]:
    """One request per step."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [
        [
            EngineRequest(
                str(n), "t", list(range(3, 12 + n)), single_adapter(versions[name] if name else None), params
            )
        ]
        for n, name in enumerate(names)
    ]


def test_adapters_loaded_beside_steps_give_the_same_answers(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits("llama")
    names = [None, "odd_rank", "r16_on_all_seven", None, "rslora", "patterns"]

    def run(stream: NotedStream | None) -> dict[str, list[int]]:
        # Each step loads one page, so some steps load a page of an adapter that no request waits for.
        engine, versions = start_engine(kit, 300, load_bytes_per_step=1)
        engine.runner.load_stream = stream
        return {name: answer.token_ids for name, answer in drive(engine, ask(kit, versions, names)).items()}

    stream = NotedStream()
    forward = StepArrays.build

    def build(*arguments: object, **options: object) -> StepArrays:
        stream.calls.append("step")
        return forward(*arguments, **options)  # type: ignore[arg-type]

    expected = run(None)
    monkeypatch.setattr(StepArrays, "build", build)
    assert run(stream) == expected
    calls = stream.calls
    copies = [at for at, call in enumerate(calls) if call == "copy"]
    assert copies and all(calls[at - 2 : at + 2] == ["mark", "step", "copy", "wait"] for at in copies)


def test_a_failed_step_completes_the_loads_beside_it(kits: Kits, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = kits("llama")
    engine, versions = start_engine(kit, 300, load_bytes_per_step=1)
    runner = engine.runner
    runner.load_stream = NotedStream()
    for requests in ask(kit, versions, [None, "odd_rank"]):
        engine.add(requests[0])
    plan = StepPlan()
    while not (plan.loads and split_loads(plan)[1]):
        plan = engine.scheduler.schedule()
        if not split_loads(plan)[1]:
            sampled = runner.run(plan)
            engine.scheduler.advance(plan)
            engine.scheduler.postprocess(plan, sampled)

    def fail(*arguments: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(StepArrays, "build", fail)
    with pytest.raises(RuntimeError, match="no step"):
        runner.run(plan)
    load = split_loads(plan)[1][-1]
    size = engine.info.full_page_bytes
    for part in range(load.first_page, load.first_page + load.num_pages):
        stored = torch.from_numpy(load.packed.buffer[part * size : (part + 1) * size])
        assert torch.equal(runner.memory.pages[load.resident.pages[part], : len(stored)], stored)
