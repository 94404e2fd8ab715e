"""LoRA beside the base's matmuls, without a GPU. Forked work runs either as early or as late as possible."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import pytest
import torch
from torch import Tensor

from slora.core.request import EngineRequest, WeightedAdapter, compose_adapters
from slora.core.sampling_params import SamplingParams
from slora.models.step_batch import StepBatch
from slora.models.weights.linear import Linear
from slora.scheduler.step_plan import StepPlan
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.triton_kernels import TritonKernels
from tests.support.driving import start_engine
from tests.support.model_kit import ModelKit
from tests.support.poison import poison

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: test_gpu.py forks on real streams"
)
LINEARS = 4
Ends = Literal["early", "late"]
ENDS: tuple[Ends, ...] = ("early", "late")
Result = TypeVar("Result")


@dataclass
class LooseStream:
    """A stream that runs forked work at the fork or at the join. A GPU's timing lies between these extremes. Records
    the calls."""

    ends: Ends
    calls: list[str] = field(default_factory=list)
    _is_forked: bool = False
    _held: list[Launch] = field(default_factory=list)

    def fork(self, work: Callable[[], Result]) -> Result:
        self.calls.append("fork")
        self._is_forked = True
        result = work()
        self._is_forked = False
        return result

    def join(self) -> None:
        self.calls.append("join")
        for launch in self._held:
            launch.run()
        self._held.clear()

    def launch(self, launch: Launch) -> None:
        kernel = launch.kernel.__name__
        if "lora" in kernel:
            self.calls.append("expand" if "expand" in kernel else "shrink")
        if self._is_forked and self.ends == "late":
            self._held.append(launch)
        else:
            launch.run()


class Steps:
    """The plans of an engine, computed by its model with Triton's kernels."""

    def __init__(self, kit: ModelKit) -> None:
        self.engine, self._versions = start_engine(kit, 100)
        poison(self.engine)

    def plan(self, *, decodes: bool, composed: bool = False) -> StepPlan:
        """composed: whether one of the requests adds two adapters up."""
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        first, second = (WeightedAdapter(self._versions[name]) for name in ("odd_rank", "some_layers"))
        asked = ((first,), (), compose_adapters([first, second]) if composed else (second,))
        for number, adapters in enumerate(asked):
            prompt = list(range(3, 6 + 2 * number))
            self.engine.add(EngineRequest(str(number), "t", prompt, adapters, params))
        scheduler, runner = self.engine.scheduler, self.engine.runner
        while True:
            plan = scheduler.schedule()
            if plan.chunks and decodes == all(chunk.num_tokens == 1 for chunk in plan.chunks):
                assert any(chunk.slots for chunk in plan.chunks)
                for load in plan.loads:
                    runner.memory.load(load)
                return plan
            sampled = runner.run(plan)
            scheduler.advance(plan)
            scheduler.postprocess(plan, sampled)

    @torch.inference_mode()
    def compute(self, plan: StepPlan, stream: LooseStream | None) -> Tensor:
        runner = self.engine.runner
        kernels = TritonKernels(Launch.run if stream is None else stream.launch)
        runner.decoder.side_stream = stream  # type: ignore[attr-defined]
        batch = StepBatch.build(plan, runner.memory, kernels.tile_limits)
        pages = runner.memory.pages.clone()
        hidden: Tensor = runner.decoder.forward(batch, runner.memory, kernels)
        runner.memory.pages.copy_(pages)
        return hidden


def test_a_shrink_on_the_side_stream_gives_the_same_bits_whenever_it_ends(
    one_layer_kit: ModelKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(one_layer_kit)
    plan = steps.plan(decodes=True)
    expected = steps.compute(plan, None)
    assert not expected.isnan().any()
    num_layers = steps.engine.info.shape.num_layers
    base, calls = Linear.apply, list[str]()

    def apply(*arguments: object) -> Tensor:
        calls.append("base")
        return base(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Linear, "apply", apply)
    for ends in ENDS:
        calls.clear()
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        try:
            assert torch.equal(steps.compute(plan, LooseStream(ends, calls)), expected), ends
        finally:
            torch.use_deterministic_algorithms(False)
        assert calls == ["fork", "shrink", "expand", "base", "join"] * (LINEARS * num_layers), ends


@pytest.mark.parametrize(
    ("composed", "site"),
    [
        pytest.param(False, ["fork", "shrink", "expand", "join"], marks=pytest.mark.soak),
        # Several adapters of a row are added in a fixed order, after the matmul.
        (True, ["fork", "shrink", "shrink", "join", "expand", "expand"]),
    ],
)
def test_a_step_with_a_chunk_gives_the_same_bits(
    one_layer_kit: ModelKit, site: list[str], *, composed: bool, soak: bool
) -> None:
    steps = Steps(one_layer_kit)
    plan = steps.plan(decodes=False, composed=composed)
    expected = steps.compute(plan, None)
    for ends in ENDS if soak or not composed else ENDS[1:]:
        stream = LooseStream(ends)
        assert torch.equal(steps.compute(plan, stream), expected), ends
        assert stream.calls[: len(site)] == site


def test_a_failed_linear_still_joins_the_side_stream(
    one_layer_kit: ModelKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the failure, the linear's input is free memory, and the shrink may still be reading it."""
    steps = Steps(one_layer_kit)
    plan = steps.plan(decodes=True)
    stream = LooseStream("late")

    def fail(*arguments: object) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Linear, "apply", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        steps.compute(plan, stream)
    assert stream.calls == ["fork", "shrink", "expand", "join"]
