"""Drives an engine step by step. The test decides before which step each request arrives."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from slora.core.cost_model import CostModel
from slora.core.engine_config import EngineConfig
from slora.core.request import EngineRequest, FinishReason, StepOutput, TokenLogprobs
from slora.engine.engine import Engine
from slora_adapters.loader.source import AdapterSource, DirectorySource
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from tests.support.cpu_kernels import KERNELS
from tests.support.model_kit import ModelKit
from tests.support.peft_adapters import make_adapter

# Fixed instead of measured, so that the same requests always make the same steps. Copying a page takes as long as
# computing two tokens. A step has time to load 1 MB of adapters.
COSTS = CostModel(
    step_s=0.01, token_s=0.001, decode_s=0.001, context_token_s=1e-6, page_copy_s=0.002, load_byte_s=1e-9
)


@dataclass(slots=True)
class Answer:
    """What the engine reported about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reason: FinishReason | None = None
    error: Exception | None = None
    num_cached: int = 0
    embedding: bytes | None = None

    @property
    def ended(self) -> bool:
        return self.reason is not None or self.error is not None

    def take(self, output: StepOutput) -> None:
        assert not self.ended, "an ended request spoke again"
        self.error = output.error
        if output.delta is not None:
            self.token_ids.extend(output.delta.token_ids)
            self.logprobs.extend(entry.logprob for entry in output.delta.logprobs or ())
            self.reason = output.delta.finish_reason
            self.num_cached += output.delta.num_cached
            self.embedding = output.delta.embedding
            if output.delta.prompt_logprobs:
                assert not self.token_ids, "a prompt's scores come before the answer"
                self.prompt_logprobs.extend(output.delta.prompt_logprobs)


# Reading an adapter with patterns starts a process, and the same few adapters serve most tests.
read_once = cache(read_adapter)


def make_source(kit: ModelKit, dtype: str = "float32") -> tuple[DirectorySource, dict[str, AdapterVersion]]:
    """A source that loads synchronously, and the adapter versions of the kit by kind. It holds these adapters in
    memory."""
    shape = kit.spec.shape(dtype)
    limits = AdapterLimits(served_dtype=dtype, base_directory=kit.directory)
    source = DirectorySource(shape, dtype, limits, num_threads=0)
    return source, {kind: source.hold(read_once(path, shape, limits)) for kind, path in kit.adapters.items()}


def add_overflowing_adapter(source: DirectorySource, kit: ModelKit, directory: Path) -> AdapterVersion:
    """Writes an adapter whose hidden states and logits are not finite, and adds it to the source."""
    make_adapter(directory, kit.read_model(), std=1e30)
    return source.add(directory)


def make_engine(
    kit: ModelKit,
    source: AdapterSource,
    num_pages: int,
    *,
    costs: CostModel | None = COSTS,
    overlap: bool | None = None,
    **settings: int | str,
) -> Engine:
    """With costs None, the engine measures its costs at start."""
    defaults = {
        "device": "cpu",
        "kernels": KERNELS,
        "dtype": "float32",
        "pool_bytes": kit.pool_bytes(num_pages),
    }
    config = EngineConfig(kit.directory, **{**defaults, **settings})  # type: ignore[arg-type]
    return Engine(config, kit.spec, source, costs, overlap=overlap)


def start_engine(
    kit: ModelKit, num_pages: int, **settings: int | str
) -> tuple[Engine, dict[str, AdapterVersion]]:
    """An engine with a source of its own, and the adapter versions of the kit by kind."""
    source, versions = make_source(kit)
    return make_engine(kit, source, num_pages, **settings), versions


def drive(engine: Engine, arrivals: Iterable[list[EngineRequest]]) -> dict[str, Answer]:
    """Adds one list of requests before each step, then steps until all requests have ended. Returns answers by
    request id.

    The second choice of a request with several choices has the key `<id>/1`, and so on.
    """
    answers: dict[str, Answer] = defaultdict(Answer)
    for requests in arrivals:
        for request in requests:
            engine.add(request)
        step(engine, answers)
    while engine.num_unfinished:
        step(engine, answers)
    engine.check_invariants()
    return answers


def step(engine: Engine, answers: dict[str, Answer]) -> None:
    for output in engine.step():
        index = output.delta.index if output.delta is not None else 0
        answers[f"{output.request_id}/{index}" if index else output.request_id].take(output)
