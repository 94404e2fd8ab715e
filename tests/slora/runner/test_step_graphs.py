"""What a graph would replay, without a GPU: the same launches on the same buffers, in Triton's interpreter."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest, WeightedAdapter, compose_adapters, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.models.step_batch import StepBatch
from slora.runner.step_graphs import StepGraphs, Work
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.triton_kernels import TritonKernels
from tests.support.driving import make_engine, make_source, start_engine
from tests.support.model_kit import ModelKit, make_kit
from tests.support.poison import poison
from tests.support.tiny_models import few_layers

# Padding rows of a batch hold whatever was in memory, and the interpreter warns when it computes them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: test_gpu.py replays real graphs"),
]

MAX_CONTEXT = 64
# Both steps have three tiles, which are padded to four, and "patterns" has the greatest rank of a site in both.
SOME = ["patterns", "odd_rank", "some_layers"]
OTHERS = ["patterns", "some_layers", "r8_on_q_and_v", None]


class Bench:
    """An engine in which all requests decode, computed by other kernels so far, and its model with Triton's kernels."""

    def __init__(self, kit: ModelKit) -> None:
        source, self.versions = make_source(kit)
        self.engine: Engine = make_engine(kit, source, 100)
        poison(self.engine)
        self.runner = self.engine.runner
        self.launches: list[Launch] = []
        self.kernels = TritonKernels(self._launch)
        self.num_captures = 0
        config = EngineConfig(kit.directory, max_num_seqs=4, block_tokens=16, max_composed_adapters=2)
        self.graphs = StepGraphs(self.forward, config, MAX_CONTEXT, torch.device("cpu"), self._capture)

    def forward(self, batch: StepBatch) -> Tensor:
        return self.runner.decoder.forward(batch, self.runner.memory, self.kernels)

    def replay(self, batch: StepBatch) -> Tensor:
        shape = self.graphs.find_shape(batch)
        assert shape is not None
        return self.graphs.run(batch, shape)

    def record(self, batch: StepBatch) -> Tensor:
        """Graphs are recorded when their shape occurs for the second time."""
        self.replay(batch)
        return self.replay(batch)

    def decode(self, adapters: list[str | None], first_length: int) -> StepBatch:
        """A step in which one request for each entry of `adapters` decodes. Request i has `first_length` + 8 i
        prompt tokens."""
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        for number, adapter in enumerate(adapters):
            prompt = list(range(3, 3 + first_length + 8 * number))
            names = [] if adapter is None else adapter.split("+")
            composed = compose_adapters(WeightedAdapter(self.versions[name]) for name in names)
            self.engine.add(EngineRequest(f"{first_length}-{number}", "t", prompt, composed, params))
        for _ in range(4):
            self.engine.step()
        plan = self.engine.scheduler.schedule()
        assert [chunk.num_tokens for chunk in plan.chunks] == [1] * len(adapters) and not plan.loads
        return StepBatch.build(plan, self.runner.memory, self.kernels.tile_limits)

    def end(self, leaving: str) -> None:
        """Ends all requests. The adapter `leaving` is evicted from its slot."""
        for sequence in list(self.engine.scheduler.batch):
            self.engine.abort(sequence.request.request_id)
        self.engine.step()
        self.engine.remove_adapter(self.versions[leaving])

    def _launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        launch.run()

    def _capture(self, work: Work) -> Work:
        self.num_captures += 1
        return work


@pytest.fixture
def bench(one_layer_kit: ModelKit) -> Bench:
    return Bench(one_layer_kit)


def check_replay(bench: Bench, batch: StepBatch, recorded: StepBatch) -> None:
    """recorded: what was in the buffers when the graph was recorded."""
    pages = bench.runner.memory.pages
    before = pages.clone()
    expected = bench.forward(batch)
    expected_pages = pages.clone()
    assert not torch.equal(bench.record(recorded), expected)
    pages.copy_(before)
    hidden = bench.replay(batch)
    assert bench.num_captures == 1
    assert hidden.shape == expected.shape and not expected.isnan().any()
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    numbers, expected_numbers = (x.view(torch.float32) for x in (pages, expected_pages))
    assert torch.equal(numbers.isnan(), expected_numbers.isnan()), "a row that fills up wrote to a page"
    torch.testing.assert_close(numbers.nan_to_num(), expected_numbers.nan_to_num(), atol=1e-4, rtol=1e-4)


def describe(launches: list[Launch], lasting: set[int]) -> list[object]:
    """Describes a launch for comparison.

    Tensors that outlive the step are described by their address. Others are described by the memory that they need.
    """

    def see(argument: object) -> object:
        if not isinstance(argument, Tensor):
            return argument
        lies = argument.data_ptr() if argument.untyped_storage().data_ptr() in lasting else None
        return argument.dtype, argument.shape, argument.stride(), lies

    return [
        (
            launch.kernel.__name__,
            launch.grid,
            {name: see(value) for name, value in launch.arguments.items()},
            launch.constants,
            launch.num_warps,
            launch.num_stages,
        )
        for launch in launches
    ]


@torch.inference_mode()
def test_loading_other_adapters_changes_no_launch_argument(bench: Bench) -> None:
    memory = bench.runner.memory
    # These live until the test ends, so no tensor of a step gets their memory.
    before = [part for part in gc.get_objects() if type(part) in (Tensor, Parameter)]
    lasting = {
        tensor.untyped_storage().data_ptr()
        for tensor in before
        if tensor.device.type == "cpu" and tensor.layout is torch.strided
    }

    def look(batch: StepBatch, run: Callable[[StepBatch], Tensor]) -> list[object]:
        bench.launches.clear()
        run(batch)
        return describe(bench.launches, lasting)

    first = bench.decode(SOME, 15)
    replayed = look(first, bench.replay)
    kernels = [launch.kernel.__name__ for launch in bench.launches if "lora" in launch.kernel.__name__]
    assert {*kernels} == {"_lora_shrink_kernel", "_lora_expand_rows_kernel"}, (
        "these are decode rows, all of them"
    )
    unpadded = look(first, bench.forward)
    assert [
        launch.kernel.__name__ for launch in bench.launches if "lora" in launch.kernel.__name__
    ] == kernels
    slots = first.lora[0].tiles[:, 0].tolist()
    held = memory.tables.groups[slots].tolist()
    bench.end("odd_rank")
    second = bench.decode(OTHERS, 6)
    assert memory.tables.groups[slots].tolist() != held, "no slot has another adapter now"
    assert look(second, bench.replay) == replayed and bench.num_captures == 1
    assert look(second, bench.forward) != unpadded
    used = {
        name for launch in bench.launches for name in launch.arguments if "lora" in launch.kernel.__name__
    }
    assert {"tiles", "weights", "page_table", "groups", "modules", "scales"} <= used


@torch.inference_mode()
def test_a_padded_step_with_composed_adapters_computes_the_same(bench: Bench) -> None:
    batch = bench.decode(["odd_rank+some_layers", "odd_rank", "some_layers"], 15)
    first, second = batch.lora
    others = replace(second, tiles=second.tiles.flip(0), weights=second.weights * 0.5)
    check_replay(bench, batch, recorded=replace(batch, lora=(first, others)))
    assert bench.graphs.find_shape(replace(batch, lora=(first, second, second))) is None


@torch.inference_mode()
def test_steps_without_adapters_launch_nothing_for_them(bench: Bench) -> None:
    batch = bench.decode([None, None], 9)
    bench.replay(batch)
    assert bench.launches and not any("lora" in launch.kernel.__name__ for launch in bench.launches)


def mix(bench: Bench, adapters: list[str | None], length: int) -> StepBatch:
    """The next step when requests of `adapters` with prompts of `length` tokens join those that decode."""
    for number, adapter in enumerate(adapters):
        version = bench.versions[adapter] if adapter is not None else None
        prompt = list(range(5, 5 + length + number))
        bench.engine.add(
            EngineRequest(f"new-{number}", "t", prompt, single_adapter(version), SamplingParams(max_tokens=3))
        )
    plan = bench.engine.scheduler.schedule()
    for load in plan.loads:
        bench.runner.memory.load(load)
    return StepBatch.build(plan, bench.runner.memory, bench.kernels.tile_limits)


@torch.inference_mode()
def test_a_padded_step_with_prompt_chunks_computes_the_same(bench: Bench) -> None:
    bench.decode(["odd_rank", None], 15)
    batch = mix(bench, ["some_layers", "odd_rank"], 5)
    (lora,) = batch.lora
    assert len(batch.token_ids) == 2 + 5 + 6 and lora.num_decodes == 1
    other_tiles = replace(lora, tiles=lora.tiles.flip(0), num_decodes=0)
    others = replace(batch, token_ids=batch.token_ids.flip(0), lora=(other_tiles,))
    check_replay(bench, batch, recorded=others)


def find_lora_code(launches: list[Launch]) -> set[object]:
    """What decides the machine code of the launches of LoRA kernels, but for the properties of their arguments."""
    return {
        (launch.kernel.__name__, *launch.constants.items(), launch.num_warps, launch.num_stages)
        for launch in launches
        if "lora" in launch.kernel.__name__
    }


@torch.inference_mode()
def test_the_first_adapters_find_their_kernels_compiled(bench: Bench) -> None:
    decoding = bench.decode(["odd_rank", "patterns"], 15)
    mixed = mix(bench, ["some_layers", "r8_on_q_and_v"], 18)
    bench.runner.kernels = bench.kernels = TritonKernels(bench.launches.append)
    bench.runner.compile_lora(0)
    compiled = find_lora_code(bench.launches)
    for batch in (decoding, mixed):
        bench.launches.clear()
        bench.replay(batch)
        assert find_lora_code(bench.launches) <= compiled and find_lora_code(bench.launches)


@pytest.mark.parametrize(
    "model", ["mixtral", "deepseek_v3", "gpt_oss", "llama4_text", "gpt2", "qwen3_5_text", "bamba", "gemma2"]
)
def test_kernels_of_adapters_are_compiled_for_every_kind_of_model(tmp_path: Path, model: str) -> None:
    """The launches are only listed. Whatever is in the memory of their results is then computed with."""
    kit = make_kit(tmp_path, model, {}, **few_layers(model, soak=False))
    engine, _ = start_engine(kit, 20, kernels="torch", max_num_seqs=4, max_model_len=64)
    launches: list[Launch] = []
    engine.runner.kernels = TritonKernels(launches.append)
    engine.runner.compile_lora(0)
    names = {launch.kernel.__name__ for launch in launches}
    assert {"_lora_shrink_kernel", "_lora_expand_rows_kernel", "_lora_expand_kernel"} <= names


@torch.inference_mode()
def test_a_shape_is_recorded_when_it_occurs_again(bench: Bench) -> None:
    batch = bench.decode(["patterns", None], 15)
    pages = bench.runner.memory.pages
    before, found = pages.clone(), []
    for captures, delayed in ((0, 1), (1, 2), (1, 2)):
        pages.copy_(before)
        found.append(bench.replay(batch).clone())
        assert (bench.num_captures, bench.graphs.num_delayed) == (captures, delayed)
    assert not found[0].isnan().any() and all(torch.equal(one, found[0]) for one in found)


@torch.inference_mode()
def test_a_new_shape_is_not_recorded_when_there_are_as_many_graphs_as_may_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora.runner.step_graphs._MAX_GRAPHS", 1)
    first = bench.decode(["patterns"], 15)
    bench.record(first)
    assert bench.graphs.find_shape(first) is not None
    assert bench.graphs.find_shape(mix(bench, ["patterns"], 18)) is None


def test_a_step_that_the_graphs_do_not_contain_is_not_replayed(bench: Bench) -> None:
    batch = mix(bench, ["r8_on_q_and_v", None, None], 9)
    find = bench.graphs.find_shape
    shape = find(batch)
    assert shape is not None and shape.tokens == 64 and not shape.only_decodes
    assert find(replace(batch, adapts_embedding=True)) is None
    (lora,) = batch.lora
    many = replace(lora, tiles=lora.tiles.repeat(5, 1), weights=lora.weights.repeat(5))
    assert len(many.tiles) > shape.lora[0].other_tiles and find(replace(batch, lora=(many,))) is None
    assert find(replace(batch, lora=(lora, many))) is None
    assert find(replace(batch, token_ids=torch.zeros(2000, dtype=torch.int64))) is None
    assert find(replace(batch, output_rows=torch.zeros(5, dtype=torch.int64))) is None
