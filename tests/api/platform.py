"""The whole API over a scripted engine. Routes, database, store and sockets are real; only the tokens are scripted.

Uploads are inspected in this process, unless a test asks for the inspector of a server. That one starts a process for
each upload.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import openai

from slora.client.replica_group import ReplicaGroup
from slora.core.engine_config import EngineConfig
from slora.core.request import FinishReason
from slora.core.usage_journal import UsageJournal
from slora.text.generation_defaults import GenerationDefaults
from slora_adapters.database.audit_log import AuditLog
from slora_adapters.database.database import Database
from slora_adapters.inspection.inspection_process import inspect
from slora_adapters.peft.adapter import AdapterLimits, CheckedAdapter
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.registry.catalog import Catalog
from slora_adapters.registry.registry import Registry
from slora_adapters.store.store_url import open_store
from slora_api.adapters.base_model import BaseIdentity, BaseModelInfo
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pin_routes import PinServices
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Canary, InspectionBounds, Inspector, Publisher
from slora_api.adapters.quarantine import LocalAdapters, Quarantine, Uploads
from slora_api.adapters.routes import AdapterServices
from slora_api.batches.batches import Batches
from slora_api.batches.files import Files, file_limits
from slora_api.batches.routes import BatchServices
from slora_api.completions.prompt_encoder import PromptEncoder
from slora_api.completions.services import AnswerServices, Generator
from slora_api.core.data_dir import DataDir
from slora_api.core.fair_slots import cpu_slots
from slora_api.core.foundation import Foundation
from slora_api.core.host_board import BoardSize, HostBoard, HostChanges
from slora_api.core.otel_tracing import OtelTracing
from slora_api.core.settings import Settings
from slora_api.http.http_protocol import ConnectionLimits
from slora_api.http.request_bounds import ServerBounds
from slora_api.http.request_limiter import RequestLimiter
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import Pepper, open_admin_key
from slora_api.keys.key_store import KeyStore, RevocationJournal
from slora_api.keys.key_use import KeyUse
from slora_api.keys.routes import Keys, KeyServices
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.live_feed import LiveFeed, LiveServices
from slora_api.metrics.metrics import Metrics
from slora_api.metrics.names import ServerNames
from slora_api.metrics.scraper import Scraper
from slora_api.operations.engines import Engines
from slora_api.operations.routes import HealthServices, OperationServices
from slora_api.operations.tenant_purge import TenantPurges
from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import default_quota
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.quotas.quota_store import AdapterQuota, QuotaStore
from slora_api.quotas.routes import QuotaServices
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.sandbox.grammar_checks import GrammarChecks
from slora_api.serve.app import make_app
from slora_api.serve.background import ChangeFollower
from slora_api.serve.composition import make_batch_runner
from slora_api.serve.services import Services
from slora_api.tenants.routes import TenantServices
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.routes import UsageServices
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_recorder import UsageRecorder
from slora_api.usage.usage_report import UsageReport
from slora_api.usage.usage_shipper import UsageShipper
from tests.adapters.hand_made import SHAPE, make_members
from tests.api.live_server import live_server
from tests.api.scripted_engine import EOS, ScriptedEngine, byte_tokenizer, deltas_of
from tests.support.migrated_file import write_migrated_database

ADMIN_KEY = "the-operators-own-key"
# Smaller than a server's reserve, so that a test can fill a disk without a reserve.
RESERVE_BYTES = 1 << 20
FIELDS = {
    "adapter_config.json": "config",
    "adapter_model.safetensors": "weights",
    "tokenizer_config.json": "tokenizer_config",
    "chat_template.jinja": "chat_template",
    "generation_config.json": "generation_config",
    "tokenizer.json": "tokenizer",
    "special_tokens_map.json": "special_tokens_map",
    "added_tokens.json": "added_tokens",
    "chat_template.json": "chat_template_json",
    "additional_chat_templates/tool_use.jinja": "tool_template",
}


def make_sdk_client(url: str, key: str) -> openai.OpenAI:
    """The caller closes it. Otherwise a later test fails when the garbage collector finds its open socket."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def open_key_store(database: Database, directory: Path) -> KeyStore:
    """Keys. The pepper and the revocation journal are files in `directory`."""
    journal = RevocationJournal(directory / "revocations")
    return KeyStore(database, Pepper.from_file(directory / "pepper"), journal)


def open_tenant_store(database: Database, directory: Path) -> TenantStore:
    return TenantStore(database, open_key_store(database, directory))


@dataclass(frozen=True)
class Parts:
    """The objects of a platform that tests look into, or change behind its back."""

    reserve: DiskReserve
    tenant_store: TenantStore
    key_store: KeyStore
    key_admin: KeyAdmin
    key_use: KeyUse
    running: RunningRequests
    catalog: ModelCatalog
    publisher: Publisher
    templates: ChatTemplates
    generator: Generator
    encoder: PromptEncoder
    purges: TenantPurges
    registry: Registry
    quota_store: QuotaStore
    quotas: QuotaMeter
    usage_shipper: UsageShipper
    batches: Batches
    all: Services


@dataclass
class Platform:
    """A running API. `engine` decides the answers."""

    url: str
    engine: ScriptedEngine
    services: Parts
    directory: Path
    sdk_clients: ExitStack = field(default_factory=ExitStack)

    def says(self, text: str, reason: FinishReason = FinishReason.STOP) -> None:
        """Makes the text the answer to every request."""
        self.engine.answers = [deltas_of(text.encode(), reason)]

    def last_prompt(self) -> str:
        """The text of the last prompt that the engine received."""
        ids = self.engine.requests[-1].prompt_token_ids
        return b"".join(b"<eos>" if token == EOS else bytes([token]) for token in ids).decode()

    def client(self, key: str) -> httpx.Client:
        # Loading CA certificates takes longer than most requests of these tests, and the tests use no TLS.
        return httpx.Client(base_url=self.url, headers=bearer(key), timeout=120, verify=False)

    def sdk(self, key: str) -> openai.OpenAI:
        """A client of the openai package, closed at the end of the platform."""
        return self.sdk_clients.enter_context(make_sdk_client(self.url, key))

    def key(self, tenant: str, adapter: str | None = None) -> str:
        """Creates a key, and the tenant if it does not exist."""
        tenant_store = self.services.tenant_store
        if tenant not in [known.name for known in tenant_store.list_tenants()]:
            tenant_store.create_tenant(tenant)
        return self.services.key_admin.create_key(self.tenant_id(tenant), adapter)[1].secret

    def tenant_id(self, name: str) -> str:
        return self.services.tenant_store.find_named(name).tenant_id

    def upload(
        self, key: str, name: str, members: dict[str, bytes] | None = None, **fields: str
    ) -> httpx.Response:
        """Sends POST /v1/adapters with the files of an adapter, named as in a PEFT directory."""
        files = {FIELDS[file]: (file, raw) for file, raw in (members or make_members()).items()}
        with self.client(key) as client:
            return client.post("/v1/adapters", data={"name": name, **fields}, files=files)


def post(platform: Platform, key: str, path: str, body: Any) -> httpx.Response:
    with platform.client(key) as client:
        return client.post(path, json=body)


@dataclass(frozen=True)
class InspectorInProcess:
    """Inspects uploads on a thread of this process. A process for each upload takes 0.3 s to start."""

    limits: AdapterLimits

    async def inspect(self, tenant: str, source: Path, scratch: Path) -> CheckedAdapter:
        return await asyncio.to_thread(inspect, source, scratch, SHAPE, self.limits)


@contextmanager
def running_platform(
    directory: Path,
    engine: ScriptedEngine,
    bounds: InspectionBounds | None = None,
    *,
    follows: bool = False,
    runs_batches: bool = False,
    connection_limits: ConnectionLimits | None = None,
    max_lora_rank: int = 128,
    tracing: OtelTracing | None = None,
    **settings: Any,
) -> Iterator[Platform]:
    """The API on a free port, with its data in `directory`.

    bounds: limits of the inspection. Each upload is then inspected in a process of its own, as in a server.
    follows: whether the engine is told about changes of other processes.
    runs_batches: whether batches are computed.
    max_lora_rank: limit of the engine.
    settings: fields of `Settings`.
    """
    tokenizer = byte_tokenizer()
    chosen = replace(Settings(EngineConfig(Path("base"), max_lora_rank=max_lora_rank)), **settings)
    reserve = DiskReserve(directory / "reserve", RESERVE_BYTES)
    file = directory / "slora.db"
    if not chosen.database and not file.exists():
        write_migrated_database(file)
    database = Database(chosen.database or file, reserve)
    pepper = Pepper.from_file(directory / "pepper")
    slots = cpu_slots(chosen.max_concurrent_per_tenant)
    templates = ChatTemplates(tokenizer, slots)
    grammars = GrammarChecks(slots)
    limits = AdapterLimits(
        max_lora_rank=chosen.engine.max_lora_rank, max_tensor_bytes=chosen.max_upload_bytes, vocab_size=257
    )
    quarantine = Quarantine(directory / "quarantine", reserve)
    inspector = InspectorInProcess(limits) if bounds is None else Inspector(SHAPE, limits, bounds)
    base = BaseModelInfo(
        "base", "base", BaseIdentity(directory / "base", ("base", "tiny-base")), GenerationDefaults(), 1
    )
    metrics = Metrics("base")
    quota_store = QuotaStore(database, default_quota(chosen))
    quota = AdapterQuota(quota_store, metrics.quota_refused)
    journal = RevocationJournal(directory / "revocations")
    key_store = KeyStore(database, pepper, journal, chosen.auth_stale_seconds)
    tenant_store = TenantStore(database, key_store)
    registry = Registry(database)
    pinning = Pinning(registry, tenant_store, engine)
    adapters = Catalog(registry, open_store(chosen.store or str(directory / "adapters")))
    canary = Canary(engine, tokenizer)
    ledger = UsageLedger(database)
    limiter = RequestLimiter(
        max_requests=chosen.max_concurrent_requests,
        max_uploads=chosen.max_concurrent_uploads,
    )
    counters = HostCounters(directory / "run" / "quotas", max_accounts=128, max_reservations=128)
    usage_journal = UsageJournal(directory / "usage")
    recorder = UsageRecorder(engine, usage_journal, observe=metrics.requests.count)
    generator = Generator(engine, tokenizer, limiter, metrics, recorder)
    limits_of = ServerBounds(chosen, generator.engine_info, tokenizer.longest_token_chars)
    catalog, uploads = ModelCatalog(base, adapters, engine, pinning), Uploads(quarantine)
    publisher = Publisher(
        base, quarantine, inspector, templates, quota.check, tenant_store, adapters, canary, engine, pinning
    )
    local_adapters = LocalAdapters(
        Path(chosen.lora_root) if chosen.lora_root else None, quarantine, chosen.max_upload_bytes
    )
    follower = ChangeFollower(registry, key_store, quota_store, engine, pinning.refresh)
    keys = Keys(key_store, KeyAdmin(key_store), KeyUse(database), RunningRequests(key_store))
    quotas = QuotaMeter(quota_store, counters, ledger, limiter, metrics.quota_refused)
    shipper = UsageShipper(usage_journal, directory / "usage", ledger, chosen.usage_days)
    encoder = PromptEncoder(tokenizer, slots)
    purges = TenantPurges(tenant_store, ledger, adapters, engine)
    batches = Batches(database, Files(database, adapters, file_limits(chosen)), chosen.max_batches_per_tenant)
    board = HostBoard.create(BoardSize(1, 1))
    engines = Engines(engine, metrics, board, database)
    names = ServerNames.of(registry, tenant_store)
    live = LiveFeed(engine, names, lambda: limiter.stopping)
    scraper = Scraper(metrics, cast(ReplicaGroup, engine), generator.engine_info, names, reserve, shipper)
    services = Services(
        Foundation(
            AsyncExitStack(),
            chosen,
            DataDir(directory),
            board,
            HostChanges(board),
            reserve,
            database,
            cast(ReplicaGroup, engine),
        ),
        keys,
        tenant_store,
        publisher,
        pinning,
        generator,
        batches,
        engines,
        counters,
        for_routes=(
            AnswerServices(chosen, catalog, slots, templates, grammars, generator, encoder, quotas),
            AdapterServices(
                limiter,
                uploads,
                publisher,
                catalog,
                local_adapters,
                tenant_store,
                limits_of,
            ),
            BatchServices(batches, limiter, chosen.max_file_bytes, quarantine),
            KeyServices(
                keys.admin,
                lambda name: tenant_store.find_named(name).tenant_id,
                catalog.check_key_adapter,
                catalog.read_allow_list,
            ),
            tenant_store,
            TenantServices(tenant_store, pinning.change_share),
            purges,
            PinServices(tenant_store, pinning, catalog, registry),
            QuotaServices(quotas, registry, quota_store, tenant_store),
            UsageServices(
                tenant_store.find_id,
                UsageReport(
                    ledger, registry.find_names, partial(tenant_store.find_names, include_former=True), "base"
                ),
            ),
            OperationServices(engines, tenant_store, AuditLog(database)),
            HealthServices(
                limiter,
                generator,
                reserve,
                engines,
                scraper,
            ),
            LiveServices(live, keys.running),
        ),
        work=[],
    )
    parts = Parts(
        reserve=reserve,
        tenant_store=tenant_store,
        key_store=key_store,
        key_admin=keys.admin,
        key_use=keys.use,
        running=keys.running,
        catalog=catalog,
        publisher=publisher,
        templates=templates,
        generator=generator,
        encoder=encoder,
        purges=purges,
        registry=registry,
        quota_store=quota_store,
        quotas=quotas,
        usage_shipper=shipper,
        batches=batches,
        all=services,
    )

    async def close() -> None:
        await templates.close()
        await grammars.close()
        await counters.close()

    app = make_app(services, open_admin_key(ADMIN_KEY, directory, pepper), tracing=tracing)
    background = [follower.run, keys.running.run, pinning.run] if follows else []
    if runs_batches:
        runner = make_batch_runner(services)
        runner.poll_s = 0.05
        background.append(runner.run)
    with live_server(app, background, at_end=close, limits=connection_limits) as url:
        # FastAPI builds its routes at the first request, which is not safe on two threads at once. A test may run two
        # platforms.
        httpx.get(url + "/healthz", verify=False).raise_for_status()
        platform = Platform(url, engine, parts, directory)
        with platform.sdk_clients:
            yield platform
    usage_journal.close()
    database.close()
    journal.close()
