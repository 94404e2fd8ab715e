"""Publishes an upload: inspect it, store its blob, try it out on the engine, and commit the version.

The route first stages the files in the quarantine. `Publisher.publish` does the other steps, in the order of the table.
The table shows what is durable after each step, and what a crash leaves behind. A step that fails cleans up at once.

| step      | durable afterwards        | a crash leaves                   | cleaned up by                       |
|-----------|---------------------------|----------------------------------|-------------------------------------|
| 1 stage   | nothing                   | files in the quarantine          | the next start                      |
| 2 inspect | nothing                   | files in the quarantine          | the next start                      |
| 3 store   | the blob, its reservation | a blob that no version refers to | `sweep`, after the reservation ends |
| 4 canary  | the blob, its reservation | a blob that no version refers to | `sweep`, after the reservation ends |
| 5 commit  | the blob, the version     | nothing                          |                                     |

The blob is stored before the canary, because the engine loads the adapter from the store like any other adapter. No
request can name the adapter before the commit.

Blocking calls run in the tenants' pool of threads (`slora_api.core.threads`). At most `MAX_WRITERS` of these threads
write to the store or create versions for uploads, so that a slow store leaves threads for everything else. No thread
waits for the canary.
"""

import asyncio
import logging
import math
import os
import signal
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from starlette.types import Receive

from slora.client.client import EngineClient
from slora.core.errors import EngineUnavailable, RequestFailed, RequestRefused
from slora.core.request import (
    NOT_SAMPLED,
    EngineRequest,
    Pooling,
    PoolingKind,
    TokenLogprobs,
    single_adapter,
)
from slora.core.sampling_params import MAX_LOGPROBS, SamplingParams
from slora.text.generation_defaults import find_unsupported_fields, read_classifier
from slora.text.tokenizer import Tokenizer
from slora_adapters.errors import AdapterInvalid, Reason, StoreUnavailable
from slora_adapters.inspection.inspection_process import InspectionTask, OutOfMemory, decode_answer, inspect
from slora_adapters.peft.adapter import AdapterExtras, AdapterLimits, CheckedAdapter
from slora_adapters.peft.extras import read_added_rows, read_added_tokens
from slora_adapters.process.children import BASE_VARIABLES, describe_exit, pass_on, start_tenant_child
from slora_adapters.registry.record import StorageUsage, check_adapter_name
from slora_adapters.registry.registry import RESERVATION_S, StoredAdapters
from slora_adapters.version import AdapterVersion
from slora_api.adapters.base_model import DEFAULT_MODEL, BaseModelInfo
from slora_api.adapters.model_catalog import CertificateObject, PublishedObject, VersionObject, version_json
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.quarantine import Quarantine, StagedUpload
from slora_api.core.errors import BadRequest, InspectionFailed
from slora_api.core.fair_slots import FairSlots, slots_of_process
from slora_api.core.threads import HOUSEKEEPING, tenant_thread
from slora_api.http.sse import unless_disconnected
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.tenants.tenant_store import TenantStore
from slora_kernels.layout import ModelShape

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# One thread per inspection, because the other cores serve requests.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# The largest valid answer has a config of 1 MiB and two texts of 256 KiB. Each of these bytes may take six bytes of
# JSON.
_MAX_ANSWER_BYTES = 16 << 20
# Two inspectors are reserved for tenants without an inspector, so that two tenants never hold all inspectors.
_NUM_INSPECTORS, _NUM_RESERVED = 4, 2
# `RequestLimiter` refuses a tenant's uploads before this limit is reached.
_MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class InspectionBounds:
    """The limits of one inspection: private memory, and CPU time that grows with the size of the upload.

    To end a process that hangs, the wall-clock time is limited to `wall_time_factor` times the CPU time. The factor is
    large, because an inspection of one CPU second can take minutes on a busy machine.

    Worked example: an upload of 80 MiB may use 5 + 10 s of CPU time; reading and checking it takes about one second.
    """

    memory_bytes: int = 512 << 20
    cpu_seconds: int = 5
    bytes_per_cpu_second: int = 8 << 20
    wall_time_factor: float = 120.0

    def cpu_seconds_for(self, source: Path) -> int:
        files = source.iterdir() if source.is_dir() else [source]
        return self.cpu_seconds + sum(file.stat().st_size for file in files) // self.bytes_per_cpu_second


class Inspector:
    """Inspects adapters for a base model of `shape` within `limits`, each in a process of its own.

    If the process crashes, hangs or exceeds a limit, only its upload is refused, with the reason. All tenants share a
    few such processes in fair order. An upload that is cancelled while it waits is never inspected.

    num_processes: number of API processes of the host, which share the inspectors.
    """

    def __init__(
        self, shape: ModelShape, limits: AdapterLimits, bounds: InspectionBounds, num_processes: int = 1
    ) -> None:
        self._shape = shape
        self._limits = limits
        self._bounds = bounds
        num_inspectors = slots_of_process(_NUM_INSPECTORS, _NUM_RESERVED, num_processes)
        self._slots = FairSlots(
            num_inspectors, _MAX_WAITING, "uploads to inspect", num_reserved=_NUM_RESERVED
        )

    async def inspect(
        self, tenant: str, source: Path, scratch: Path, *, is_trusted: bool = False
    ) -> CheckedAdapter:
        """Inspects the adapter in `source`, which is a PEFT directory or an archive of one. Writes only to the empty
        folder `scratch`. The adapter's tensor file may be there afterwards.

        is_trusted: whether the files are the operator's. This process then reads them itself, because starting a
            process takes most of the time of an inspection.

        Raises AdapterInvalid with every reason, InspectionFailed, DiskFull, or TenantBusy.
        """
        if is_trusted:
            return await tenant_thread(tenant, inspect, source, scratch, self._shape, self._limits)
        async with self._slots.hold(tenant):
            return await self._inspect(source, scratch)

    async def _inspect(self, source: Path, scratch: Path) -> CheckedAdapter:
        bounds = self._bounds
        cpu_seconds = bounds.cpu_seconds_for(source)
        wall_seconds = bounds.wall_time_factor * cpu_seconds
        task = InspectionTask(
            source,
            scratch,
            self._shape,
            self._limits,
            bounds.memory_bytes,
            cpu_seconds,
            parent=os.getpid(),
        )
        process = await _start(task)
        try:
            async with asyncio.timeout(wall_seconds):
                line = await _read_line(process)
                exit_code = await process.wait()
        except TimeoutError:
            raise InspectionFailed(
                f"The check of the adapter did not finish within {wall_seconds:g} s, because the "
                "server is too busy. Try again."
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if exit_code == -signal.SIGXCPU:
            raise _over_limit(f"over {cpu_seconds} s of CPU time")
        try:
            return decode_answer(line)
        except OutOfMemory:
            raise _over_limit(f"over {bounds.memory_bytes} bytes of memory") from None
        except ValueError:
            raise InspectionFailed(
                f"The process that checked the adapter ended with {describe_exit(exit_code)} before it "
                "had a result. The server's log has the reason."
            ) from None


async def _start(task: InspectionTask) -> Process:
    arguments = ("-m", "slora_adapters.inspection.inspection_process", task.to_json())
    environment = pass_on(os.environ, BASE_VARIABLES) | _ENVIRONMENT
    return await start_tenant_child(
        *arguments, environment=environment, stdin=DEVNULL, stdout=PIPE, limit=_MAX_ANSWER_BYTES
    )


async def _read_line(process: Process) -> bytes:
    """Returns the process's answer; empty if it is longer than any valid answer."""
    assert process.stdout is not None
    try:
        return await process.stdout.readline()
    except ValueError:
        return b""


def _over_limit(what: str) -> AdapterInvalid:
    message = (
        f"the check of the adapter takes {what}, which is more than any valid adapter of this size needs"
    )
    return AdapterInvalid((Reason("inspection_limit", message),))


# A tenant's name cannot contain a colon.
CANARY_TENANT = "slora:canary"
# The prompt is shorter than a default KV block of 16 tokens, so that the prefix cache keeps nothing of it.
_PROMPT_TOKENS = 10
_TIMEOUT_S = 120.0


class Canary:
    """Runs a new adapter once before any request can use it: its output must be finite and differ from the base's.

    The canary sends the engine two requests with the same short prompt: one with the adapter, and one without it. It
    compares the log-probabilities of the prompt's tokens and of the most probable tokens at each position. Both
    requests belong to an internal tenant that is never charged. They are scheduled like other requests, so a busy
    server delays an upload. An upload costs the engine about twenty tokens of compute.

    The prompt is made of token ids rather than of text, because a vocabulary need not contain any given text.

    On GPUs the rounding depends on the batch, so even two runs of the base model may differ in the last digits. An
    adapter without a real effect may therefore pass on a GPU. The inspection has already refused adapters whose LoRA
    factors are zero.

    timeout_s: time limit for the two requests together.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, timeout_s: float = _TIMEOUT_S) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s

    async def check_tokens(self, tenant: str, extras: AdapterExtras) -> list[Reason]:
        """Returns a reason to refuse the adapter if the base's tokenizer cannot have its added tokens."""
        try:
            tokens = read_added_tokens(extras.generation_config)
            await tenant_thread(tenant, self._tokenizer.with_added_tokens, tokens)
        except ValueError as error:
            return [Reason("added_tokens", str(error))]
        return []

    async def classify(self, version: AdapterVersion, canary_tokens: Sequence[int]) -> None:
        """Tries out an adapter that classifies texts: its logits must be finite. Raises the errors of `try_out`."""
        prompt = [*choose_prompt(self._tokenizer, self._client.info.vocab_size), *canary_tokens]
        request = EngineRequest(
            uuid.uuid4().hex,
            CANARY_TENANT,
            prompt,
            single_adapter(version),
            NOT_SAMPLED,
            pooling=Pooling(PoolingKind.CLASSIFY, normalize=False),
        )
        with _refusing_unservable():
            async with self._within_time(), aclosing(self._client.generate(request)) as deltas:
                async for _ in deltas:
                    pass

    async def try_out(self, version: AdapterVersion, canary_tokens: Sequence[int]) -> float:
        """Returns the largest absolute change of a log-probability that the adapter causes.

        canary_tokens: some tokens that show an effect of the adapter.

        Raises AdapterInvalid if a log-probability is not finite, or if all log-probabilities equal those of the base
        model. Raises InspectionFailed if no answer arrives in time. Raises the engine's own errors if the engine is
        unavailable or cannot load the adapter.
        """
        prompt = [*choose_prompt(self._tokenizer, self._client.info.vocab_size), *canary_tokens]
        async with self._within_time():
            base = await self._score(None, prompt)
            own = await self._score_adapter(version, prompt)
        if own == base:
            raise _refused(
                "no_effect",
                f"the adapter has no effect: for a prompt of {len(prompt)} tokens, all {len(own)} "
                "log-probabilities equal those of the base model; save the adapter after training",
            )
        # The two runs may sample different last tokens, whose log-probabilities cannot be compared.
        return max(abs(own[key] - base[key]) for key in own.keys() & base.keys())

    @asynccontextmanager
    async def _within_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise InspectionFailed(
                f"The trial run of the adapter did not finish within {self._timeout_s:g} s, because "
                "the server is too busy. Try again."
            ) from None

    async def _score_adapter(self, version: AdapterVersion, prompt: list[int]) -> "_Scores":
        with _refusing_unservable():
            scores = await self._score(version, prompt)
        if not all(map(math.isfinite, scores.values())):
            raise _refused("not_finite", "the adapter causes log-probabilities that are NaN or infinite")
        return scores

    async def _score(self, version: AdapterVersion | None, prompt: list[int]) -> "_Scores":
        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
        )
        request = EngineRequest(uuid.uuid4().hex, CANARY_TENANT, prompt, single_adapter(version), sampling)
        entries: list[TokenLogprobs | None] = []
        async with aclosing(self._client.generate(request)) as deltas:
            async for arrived in deltas:
                for delta in arrived:
                    entries += [*delta.prompt_logprobs, *(delta.logprobs or ())]
        return dict(_list_scores(entries))


@contextmanager
def _refusing_unservable() -> Iterator[None]:
    try:
        yield
    except RequestRefused as error:
        raise _refused("not_servable", f"the adapter cannot be served here: {error}") from None
    except RequestFailed as error:
        raise _refused(
            "not_finite", f"the adapter makes the model's outputs NaN or infinite: {error}"
        ) from None


def choose_prompt(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns at most ten token ids, spread evenly over the model's vocabulary. They are the same in each call.

    Added tokens are avoided where possible, because many have embeddings that were never trained.
    """
    limit, added = min(vocab_size, tokenizer.vocab_size), tokenizer.added_token_ids
    starts = (limit * position // _PROMPT_TOKENS for position in range(_PROMPT_TOKENS))
    plain = (
        next((token_id for token_id in range(start, limit) if token_id not in added), 0) for start in starts
    )
    return list(dict.fromkeys(plain))


# (position, token id) -> log-probability. The token id -1 stands for the token of the prompt or answer at that
# position.
_Scores = dict[tuple[int, int], float]


def _list_scores(entries: Sequence[TokenLogprobs | None]) -> Iterator[tuple[tuple[int, int], float]]:
    for position, entry in enumerate(entries):
        if entry is not None:
            yield (position, -1), entry.logprob
            yield from (((position, token_id), logprob) for token_id, logprob in entry.top)


def _refused(code: str, message: str) -> AdapterInvalid:
    return AdapterInvalid((Reason(code, message),))


# Equal to the number of uploads that are inspected at once, and half of the threads of the tenants' pool.
MAX_WRITERS = 4

# Raises QuotaExceeded if a tenant, with this usage, may not have the adapter as a new version of the name.
CheckQuota = Callable[[str, StorageUsage, str, CheckedAdapter], None]


class Publisher:
    """Publishes the uploads of all tenants. Runs on one event loop."""

    def __init__(
        self,
        base: BaseModelInfo,
        quarantine: Quarantine,
        inspector: Inspector,
        templates: ChatTemplates,
        check_quota: CheckQuota,
        tenant_store: TenantStore,
        adapters: StoredAdapters,
        canary: Canary,
        client: EngineClient,
        pinning: Pinning,
    ) -> None:
        self._base = base
        self._quarantine = quarantine
        self._inspector = inspector
        self._templates = templates
        self._check_quota = check_quota
        self._tenant_store = tenant_store
        self._adapters = adapters
        self._canary = canary
        self._client = client
        self._pinning = pinning
        self._writers = asyncio.Semaphore(MAX_WRITERS)
        # The lock of a tenant exists only while an upload of the tenant uses it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(
        self,
        tenant: str,
        upload: StagedUpload,
        receive: Receive | None = None,
        await_engine: Callable[[], Awaitable[None]] | None = None,
    ) -> PublishedObject:
        """Makes the upload the next version of its name, and returns the version with its certificate.

        receive: the ASGI channel of the client. If the client hangs up, the inspection is cancelled. After the
        inspection, the upload always runs to its end.
        await_engine: returns when the engine is ready. It is called after the inspection and the checks of tokens and
        of the chat template, which need no engine. None: the engine must be ready now.

        If the newest version is the same adapter, that version is returned with `new_version` False. So a client that
        lost the answer can repeat the upload. Raises EngineUnavailable, BadRequest, AdapterInvalid with all reasons,
        InspectionFailed, QuotaExceeded, TenantSuspended, StoreUnavailable.
        """
        self.check_upload(upload, needs_engine=await_engine is None)
        async with self._quarantine.folder(tenant) as scratch:
            inspection = self._inspector.inspect(tenant, upload.source, scratch, is_trusted=upload.is_trusted)
            adapter = await (inspection if receive is None else unless_disconnected(receive, inspection))
            base = await self._base.identity.compare(upload.base_fingerprint, adapter.certificate.base_name)
            reasons = await self._check_extras(tenant, adapter)
            if await_engine is not None:
                await await_engine()
            text = adapter.extras.generation_config
            num_tokens = self._client.info.vocab_size + read_added_rows(text)
            if reasons := [*find_unsupported_fields(text, num_tokens), *reasons]:
                raise AdapterInvalid(tuple(reasons))
            # Store one upload of a tenant at a time, so that one tenant never occupies all writers or runs several
            # canaries.
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                version, is_new, effect = await self._store_and_commit(tenant, upload.name, adapter)
        certificate = adapter.certificate
        shown: CertificateObject = {
            "modules_adapted": certificate.adapted,
            "modules_total": certificate.base_modules,
            "modules": dict(certificate.modules),
            "pool_bytes": self._count_pool_bytes(adapter),
            "base": base,
            "logprob_change": effect,
            "uses": list(adapter.extras.uses),
            "predicted_load_ms": await self._predict_load_ms(adapter),
        }
        source = None if upload.hub is None else str(upload.hub)
        return {**version, "new_version": is_new, "source": source, "certificate": shown}

    async def sweep(self) -> None:
        """Runs until cancelled. Each sweep deletes the blobs that crashed uploads left in the store. It runs on a
        thread, because it examines every blob.

        The first sweep runs at the start, the others every `RESERVATION_S`. Within that time, an upload has finished or
        its reservation has expired.
        """
        while True:
            try:
                await tenant_thread(HOUSEKEEPING, self._adapters.sweep)
            except StoreUnavailable as error:
                _log.error(
                    "unreferenced adapters could not be deleted from the store; the next sweep tries "
                    "again: %s",
                    error,
                )
            await asyncio.sleep(RESERVATION_S)

    def check_upload(self, upload: StagedUpload, *, needs_engine: bool = True) -> None:
        """Checks what needs no files. Raises BadRequest, BadAdapterName, EngineUnavailable."""
        if upload.name in (DEFAULT_MODEL, self._base.name):
            raise BadRequest(
                f"`{upload.name}` is a reserved name on this server; choose another name.", "name"
            )
        check_adapter_name(upload.name)
        if needs_engine and not self._client.ready:
            # No adapter can be tried out without an engine.
            raise EngineUnavailable(
                "the engine is starting and cannot try the adapter yet; upload it again shortly"
            )

    async def _check_extras(self, tenant: str, adapter: CheckedAdapter) -> list[Reason]:
        """Returns reasons to refuse the adapter for its added tokens and its chat template."""
        reasons = await self._canary.check_tokens(tenant, adapter.extras)
        if adapter.extras.chat_template is not None:
            reasons += await self._templates.check(tenant, adapter.extras.chat_template)
        return reasons

    async def _store_and_commit(
        self, tenant: str, name: str, adapter: CheckedAdapter
    ) -> tuple[VersionObject, bool, float | None]:
        """Stores the blob, runs the canary and commits the version. Returns the version, whether it is new, and the
        change of log-probabilities that the canary found.

        The change is None if the newest version is the same adapter, which was tried out when it was uploaded, or if
        the adapter classifies texts.
        """
        registry = self._adapters.registry
        # Read the usage before anything is stored, because `_try_out` must know whether the tenant already had these
        # weights.
        version = AdapterVersion(tenant, adapter.digest)
        is_new, usage = await tenant_thread(tenant, registry.before_push, name, version, adapter.extras)

        def check(usage: StorageUsage) -> None:
            self._tenant_store.find_tenant(tenant).check_active()
            self._check_quota(tenant, usage, name, adapter)

        if is_new:
            # Check here to save work. The transaction that creates the version checks again.
            await tenant_thread(tenant, check, usage)
        reservation = await self._write(tenant, self._adapters.store_blob, adapter)
        try:
            effect = await self._try_out(tenant, adapter, usage) if is_new else None
            published = await self._write(
                tenant, self._adapters.commit, tenant, name, adapter, reservation, check
            )
        except BaseException:
            await self._write(tenant, self._adapters.discard, adapter, reservation)
            raise
        if published.moved_pin:
            self._pinning.refresh()
        return version_json(published.record, published.rollouts), published.is_new, effect

    async def _try_out(self, tenant: str, adapter: CheckedAdapter, usage: StorageUsage) -> float | None:
        """Runs the canary. The engine loads the adapter without regard to the tenant's share of the pool, so the engine
        drops the adapter afterwards. An adapter with weights that the tenant already had is kept.
        """
        version = AdapterVersion(tenant, adapter.digest)
        try:
            if read_classifier(adapter.extras.generation_config) is not None:
                await self._canary.classify(version, adapter.canary_tokens)
                return None
            return await self._canary.try_out(version, adapter.canary_tokens)
        finally:
            if usage.weights_bytes is None:
                with suppress(EngineUnavailable):
                    await self._client.remove_adapter(version)

    async def _predict_load_ms(self, adapter: CheckedAdapter) -> dict[str, float | None] | None:
        """Predicts load times from recent loads; see `LoadPaces.load_ms`. Returns None if the engine has just died."""
        try:
            paces = (await self._client.stats()).load_paces
        except EngineUnavailable:
            return None
        return paces.load_ms(
            self._count_pool_bytes(adapter), self._adapters.store.tiers, self._client.info.num_ranks
        )

    def _count_pool_bytes(self, adapter: CheckedAdapter) -> int:
        return self._client.info.count_rank_bytes(adapter.certificate.pool_bytes, adapter.target_modules)

    async def _write(self, tenant: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._writers:
            return await tenant_thread(tenant, call, *args, **kwargs)
