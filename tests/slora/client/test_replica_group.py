"""Streams of a group of engine processes, which are killed while they compute them."""

import asyncio
import signal
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from slora.client.replica_group import ReplicaGroup
from slora.core.request import EngineRequest, RequestTiming, RequestUsage, single_adapter
from slora.core.sampling_params import OutputKind, SamplingParams, StructuredOutput
from tests.api.served import EOS, write_tokenizer
from tests.support.driving import Answer
from tests.support.engine_stack import WAIT_S, ChildProcess, EngineStack, find_owner, open_stack, wait_until
from tests.support.model_kit import make_kit
from tests.support.peft_adapters import KINDS

KIND = "r8_on_q_and_v"
NUM_TOKENS = 200
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, seed=7, ignore_eos=True, logprobs=2)
FORM = StructuredOutput(OutputKind.REGEX, "([a-z]{3}[0-9]{2}){35}", "structured_outputs")
CASES = {
    "greedy": replace(SAMPLED, temperature=0.0),
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    "choices": replace(SAMPLED, n=2, prompt_logprobs=1),
    "form": SamplingParams(max_tokens=NUM_TOKENS, seed=3, structured_output=FORM),
}


class Replicas:
    """The engine processes of a stack, by the name of their replica."""

    def __init__(self, stack: EngineStack, root: Path, num_replicas: int) -> None:
        self.sockets = [root / f"engine-{number}.sock" for number in range(num_replicas)]
        self._stack = stack
        self._processes: dict[str, ChildProcess] = {}

    def start(self) -> None:
        """Starts the engines that do not run."""
        for path in self.sockets:
            if path.stem not in self._processes:
                self._processes[path.stem] = self._stack.start_engine(socket=path)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    sizes = {
        "vocab_size": EOS + 1,
        "num_hidden_layers": 1,
        "eos_token_id": EOS,
        "max_position_embeddings": 4096,
    }
    kit = make_kit(tmp_path_factory.mktemp("characters"), "llama", {KIND: KINDS[KIND]}, **sizes)
    write_tokenizer(kit.directory)
    with open_stack(kit, num_pages=400) as stack:
        stack.start_loader()
        yield stack


@asynccontextmanager
async def running_group(
    stack: EngineStack, num_replicas: int
) -> AsyncIterator[tuple[ReplicaGroup, Replicas]]:
    with tempfile.TemporaryDirectory() as root:
        replicas = Replicas(stack, Path(root), num_replicas)
        group = ReplicaGroup(replicas.sockets, WAIT_S)
        running = asyncio.create_task(group.run())
        try:
            replicas.start()
            await wait_until(lambda: all(group.health.values()))
            yield group, replicas
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            replicas.stop()


class Log:
    """The usage that a group reports. Each request may be reported once."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.usage: dict[str, RequestUsage | None] = {}
        self._group = group
        group.listen_for_usage(self._note)

    def _note(self, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        assert request_id not in self.usage, "a request is billed twice"
        self.usage[request_id] = usage
        self._group.acknowledge_usage(request_id)


def ask(stack: EngineStack, case: str, name: str) -> EngineRequest:
    version = stack.versions[KIND] if len(case) % 2 else None
    return EngineRequest(name, "tenant", [1, 2, 3], single_adapter(version), CASES[case], account="key")


async def collect_all(group: ReplicaGroup, stack: EngineStack, suffix: str) -> dict[str, dict[int, Answer]]:
    """The choices of a request of each case, which no loss disturbs."""
    found = await asyncio.gather(*(collect(group, ask(stack, case, f"{case} {suffix}")) for case in CASES))
    return dict(zip(CASES, found, strict=True))


async def collect(
    group: ReplicaGroup, request: EngineRequest, started: asyncio.Event | None = None
) -> dict[int, Answer]:
    """The choices of a request. started: set when the first token arrives."""
    choices: dict[int, Answer] = defaultdict(Answer)
    async for deltas in group.generate(request):
        for delta in deltas:
            choice = choices[delta.index]
            choice.prompt_logprobs.extend(delta.prompt_logprobs)
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(entry.logprob for entry in delta.logprobs or ())
            choice.reason = delta.finish_reason
            if started is not None and delta.token_ids:
                started.set()
    return choices


@pytest.mark.parametrize("num_replicas", [pytest.param(2, marks=pytest.mark.soak), 1])
def test_streams_of_killed_engines_equal_undisturbed_streams(
    stack: EngineStack, num_replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running_group(stack, num_replicas) as (group, replicas):
            log = Log(group)
            expected = await collect_all(group, stack, "before")
            started = {case: asyncio.Event() for case in CASES}
            with stack.slowed():
                streams = {
                    case: asyncio.create_task(collect(group, ask(stack, case, case), started[case]))
                    for case in CASES
                }
                for case in ("sampled", "choices")[:num_replicas]:
                    await started[case].wait()
                    replicas.kill(find_owner(group, case) or replicas.sockets[0].stem)
                    replicas.start()
                    await wait_until(lambda: all(group.health.values()))
            for case, stream in streams.items():
                for index, choice in (await stream).items():
                    before = expected[case][index]
                    assert choice.token_ids == before.token_ids and choice.reason == before.reason, case
                    assert choice.logprobs == pytest.approx(before.logprobs, abs=1e-4)
                    assert len(choice.prompt_logprobs) == len(before.prompt_logprobs)
                usage, usage_before = log.usage[case], log.usage[f"{case} before"]
                assert usage is not None and usage_before is not None
                assert usage.generated_tokens == usage_before.generated_tokens, case
                assert usage.prompt_tokens == usage_before.prompt_tokens, case
            assert "it is sent to another one" in caplog.text

    asyncio.run(main())
