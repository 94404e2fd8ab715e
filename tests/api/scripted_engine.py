"""An engine with scripted answers, for cases that a real engine does not produce on demand."""

import asyncio
import threading
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, get_origin, get_type_hints

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from slora.client.client import UsageListener
from slora.core.cost_model import CostModel
from slora.core.engine_state import (
    AdapterPlace,
    EngineInfo,
    EngineState,
    EngineStats,
    HistogramCounts,
    LiveState,
    LoadPaces,
    PageCounts,
    PageMap,
    Pin,
    ServedCounts,
    TenantPurge,
    TenantState,
)
from slora.core.errors import EngineUnavailable
from slora.core.request import (
    EngineRequest,
    FinishReason,
    RequestTiming,
    RequestUsage,
    TenantShare,
    TokenDelta,
    TokenLogprobs,
)
from slora.text.tokenizer import Tokenizer
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.version import AdapterVersion
from slora_api.adapters.publisher import CANARY_TENANT
from tests.adapters.hand_made import SHAPE

EOS = 256
_EMPTY: dict[Any, Callable[[], object]] = {
    Mapping: dict,
    HistogramCounts: lambda: HistogramCounts((), (0,), 0.0),
    LoadPaces: lambda: LoadPaces(1e-9, {}),
    CostModel: lambda: CostModel(0.01, 0.001, 0.002, 1e-6, 0.003, 1e-9),
}


def make_stats(**given: Any) -> EngineStats:
    """Statistics with the given fields. Every other count has a number of its own, and other fields are empty."""
    kinds = get_type_hints(EngineStats)
    values = dict[str, Any]()
    for number, part in enumerate(fields(EngineStats)):
        if part.default is MISSING:
            kind = get_origin(kinds[part.name]) or kinds[part.name]
            values[part.name] = number if kind is int else _EMPTY.get(kind, kind)()
    return EngineStats(**values | given)


_TIMES = HistogramCounts((0.5, 1.0), (1, 2, 3), 9.0)
STATS = make_stats(
    running=1,
    waiting=2,
    awaiting_adapter=0,
    pages_total=100,
    pages_free=60,
    pages_held=30,
    pages_cached=10,
    adapter_pages=5,
    resident_adapters=1,
    adapter_loads=3,
    adapter_evictions=2,
    pinned_adapters=4,
    pinned_loaded=3,
    pin_failures=5,
    preemptions=1,
    prefix_queries=90,
    prefix_hits=32,
    prefix_evictions=7,
    swapped_out_pages=5,
    swapped_in_pages=4,
    swap_pages_total=20,
    swap_pages_used=6,
    deadline_misses=2,
    prompt_tokens=50,
    generated_tokens=40,
    drafts=6,
    draft_tokens=20,
    accepted_draft_tokens=15,
    steps=9,
    not_finite=3,
    loads_by_cause={"request": 2, "pin": 1},
    evictions_by_cause={"pages": 2, "slot": 0},
    preemptions_by_kind={"swap": 1, "recompute": 3},
    fetches_by_outcome={"fetched": 3, "corrupt": 1},
    step_seconds=_TIMES,
    step_tokens=_TIMES,
    token_gaps=_TIMES,
    tenants={"t": ServedCounts(3, 40, 32, 20, 1, 0.5), "other": ServedCounts(1, 7)},
    adapters={
        "t/abc": ServedCounts(2, 20, 16, 10, 1),
        "t/def": ServedCounts(1),
        "other": ServedCounts(),
    },
    pooled_adapters=("t/abc",),
    pages=PageCounts(27, 8, 3, 2),
    tenant_pages={"t": PageCounts(20, 4, 3, 2), "other": PageCounts(2)},
    load_paces=LoadPaces(1e-9, {"file": 4e-9}),
    host_cache=CacheCounts(5, 600, 1000, {"t": 400}, ("t/abc", "t/def")),
    live=LiveState(0.0, PageMap(1, bytes(200), ()), TenantState(), {}, (), 0, None, 0.0, 0.0, ()),
)


def fast_byte_tokenizer() -> FastTokenizer:
    """One token for each byte, with the byte's value as id. Token 256 is the end of text."""
    # ByteLevel's own alphabet, ordered by the bytes that its characters stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + position): byte for position, byte in enumerate(others)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    return fast


def byte_tokenizer(fast: FastTokenizer | None = None) -> Tokenizer:
    """The same tokenizer as the server loads it, with a chat template. fast: another one."""
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    return Tokenizer(fast or fast_byte_tokenizer(), {"eos_token": "<eos>"}, template)


def deltas_of(text: bytes, reason: FinishReason = FinishReason.LENGTH) -> list[TokenDelta]:
    """One delta for each byte. The last delta has the reason. With STOP, an end-of-text token follows the bytes."""
    tokens = list(text) + ([EOS] if reason is FinishReason.STOP else [])
    return [
        TokenDelta((token,), reason if at == len(tokens) - 1 else None) for at, token in enumerate(tokens)
    ]


def trial_of(request: EngineRequest, logprob: float | None = None) -> list[TokenDelta]:
    """One token. By default, its log-probability differs between an adapter and the base model."""
    if logprob is None:
        logprob = -1.0 if not request.adapters else -2.0
    entry = TokenLogprobs(logprob, ((65, logprob),))
    return [TokenDelta((65,), FinishReason.LENGTH, (entry,))]


def embed(request: EngineRequest) -> list[TokenDelta | Exception]:
    """A vector whose components depend on the prompt and on the place. It is not normalized."""
    assert request.pooling is not None
    first = request.prompt_token_ids[0] / 256
    size = request.pooling.dimensions or SHAPE.hidden_size
    numbers = array("f", (first + place / 3 for place in range(size)))
    return [TokenDelta((), FinishReason.STOP, embedding=numbers.tobytes())]


@dataclass
class ScriptedEngine:
    """An EngineClient with scripted answers.

    answers: the answer to each request, in order; an exception in the list is raised.
    embeddings: the answer to each request for an embedding.
    canary: answers to the canary of a new adapter and to the base model's run beside it; these are not in `requests`.
    gate: if set, an answer begins only when this event is set.
    hung: requests that wait for nothing after the last token of their answer.
    aborted: requests whose answer was closed before its end.
    ended: single choices that were closed early, as (request id, index).
    pins: the pins of each message. num_refused_pins: messages while it was not ready.
    prewarmed: the prewarmed adapters, with the share of each.
    acknowledged: requests whose usage was acknowledged.
    names: the engine processes that it stands for. lost: those that do not serve, with the reason.
    loaded_adapters, waiting_adapters: what the statistics list.
    """

    answers: Sequence[Sequence[TokenDelta | Exception]] = ()
    hang: bool = False
    gate: threading.Event | None = None
    ready: bool = True
    on_request: Callable[[EngineRequest], None] = lambda request: None
    max_model_len: int = 64
    max_num_seqs: int = 8
    scheduling: str = "fair"
    num_ranks: int = 1
    canary: Callable[[EngineRequest], Sequence[TokenDelta | Exception]] = lambda request: trial_of(request)
    embeddings: Callable[[EngineRequest], Sequence[TokenDelta | Exception]] = embed
    requests: list[EngineRequest] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    pins: list[list[Pin]] = field(default_factory=list)
    num_refused_pins: int = 0
    prewarmed: list[Pin] = field(default_factory=list)
    forgotten: list[AdapterVersion] = field(default_factory=list)
    purged: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    acknowledged: list[str] = field(default_factory=list)
    loaded_adapters: tuple[tuple[str, str], ...] = ()
    waiting_adapters: tuple[tuple[str, str], ...] = ()
    on_usage: UsageListener = lambda request_id, usage, timing: None
    snapshot: EngineStats = STATS
    num_observations: int = 0
    names: Sequence[str] = ("engine",)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            "base", self.max_model_len, 257, (EOS,), "float32", "auto", "cpu", "torch", 100, 16, 1024, 64, 4,
            self.max_num_seqs, self.scheduling, SHAPE, num_ranks=self.num_ranks,
        )  # fmt: skip

    def reset(self, *answers: Sequence[TokenDelta | Exception]) -> None:
        """Sets the answers of the next test, and undoes what the tests before it changed."""
        self.answers, self.embeddings = answers, embed
        self.hang, self.ready, self.on_request = False, True, lambda request: None
        self.gate = None
        self.names = ("engine",)
        self.lost.clear()
        self.requests.clear()
        self.hung.clear()
        self.aborted.clear()
        self.ended.clear()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        if request.tenant == CANARY_TENANT:
            for item in self.canary(request):
                if isinstance(item, Exception):
                    raise item
                yield [item]
            if self.hang:
                await asyncio.Event().wait()
            return
        if request.pooling is not None:
            script = self.embeddings(request)
        else:
            script = self.answers[len(self.requests) % len(self.answers)]
        self.requests.append(request)
        self.on_request(request)
        self.started.set()
        unfinished = set(range(request.sampling.num_choices))
        usage = RequestUsage(len(request.prompt_token_ids))
        is_reported = False

        def report(known: RequestUsage | None) -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                self.on_usage(request.request_id, known, None if known is None else self.time(request))

        try:
            while self.gate is not None and not self.gate.is_set():
                await asyncio.sleep(0.001)
            for item in script:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    unfinished.clear()
                    report(None if isinstance(item, EngineUnavailable) else usage)
                    raise item
                num_tokens = len(item.token_ids)
                usage += RequestUsage(generated_tokens=num_tokens, page_seconds=num_tokens / 8)
                if (request.request_id, item.index) in self.ended:
                    continue
                if item.finish_reason is not None:
                    unfinished.remove(item.index)
                if not unfinished:
                    report(usage)
                yield [item]
            if self.hang:
                self.hung.append(request.request_id)
                await asyncio.Event().wait()
        finally:
            if unfinished - {index for name, index in self.ended if name == request.request_id}:
                self.aborted.append(request.request_id)
            report(usage)

    def time(self, request: EngineRequest) -> RequestTiming:
        """One second in the queue, two for the adapter, three of prefill and four of decode, in which it was preempted
        once."""
        return RequestTiming(10.0, 1.0, bool(request.adapters), 12.0, 13.0, 16.0, 20.0, 1)

    def listen_for_usage(self, listener: UsageListener) -> None:
        self.on_usage = listener

    def acknowledge_usage(self, request_id: str) -> None:
        self.acknowledged.append(request_id)

    def end_choice(self, request_id: str, index: int) -> None:
        self.ended.append((request_id, index))

    async def stats(self, watched: Collection[str] | None = None) -> EngineStats:
        if watched is not None:
            self.num_observations += 1
            if not self.ready:
                raise EngineUnavailable("the engine is not ready")
        return replace(
            self.snapshot,
            loaded_adapters=self.loaded_adapters,
            waiting_adapters=self.waiting_adapters,
            live=None if watched is None else self.snapshot.live,
            engines=tuple(await self.list_engines()),
        )

    @property
    def health(self) -> dict[str, bool]:
        return {name: problem is None for name, problem in self.problems.items()}

    @property
    def problems(self) -> dict[str, str | None]:
        return {name: self.lost.get(name) for name in self.names}

    async def list_engines(self) -> list[EngineState]:
        return [
            EngineState(name, problem, "cpu", None if problem else self.snapshot)
            for name, problem in self.problems.items()
        ]

    def can_stop(self, name: str) -> bool:
        return name not in self.lost

    def stop_engine(self, name: str) -> None:
        self.lost[name] = "it stops, and is then started again"

    @property
    def sent_versions(self) -> set[AdapterVersion]:
        asked = {version for request in self.requests for version in request.versions}
        return asked - set(self.forgotten)

    async def purge_tenant(self, tenant: str) -> TenantPurge:
        if not self.ready:
            raise EngineUnavailable("it is not there")
        self.purged.append(tenant)
        return TenantPurge(1, 2, 3)

    async def remove_adapter(self, version: AdapterVersion) -> None:
        self.forgotten.append(version)

    async def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        if not self.ready:
            raise EngineUnavailable("it is not there")
        self.prewarmed.append(Pin(version, share))
        return AdapterPlace.FETCHING

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        if not self.ready:
            self.num_refused_pins += 1
            raise EngineUnavailable("it is not there")
        self.pins.append(list(pins))
