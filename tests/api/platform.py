"""The whole API over a scripted engine. Routes, database, store and sockets are real; only the tokens are scripted.

Uploads are inspected in this process, unless a test asks for the inspector of a server. That one starts a process for
each upload.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import httpx
import openai

from slora.client.replica_group import ReplicaGroup
from slora.core.engine_config import EngineConfig
from slora.core.request import FinishReason
from slora.text.generation_defaults import GenerationDefaults
from slora_adapters.database.database import Database
from slora_adapters.inspection.inspection_process import inspect
from slora_adapters.peft.adapter import AdapterLimits, CheckedAdapter
from slora_adapters.process.full_disk import DiskReserve
from slora_api.adapters import build
from slora_api.adapters.base_model import BaseIdentity, BaseModelFiles, BaseModelInfo
from slora_api.adapters.publisher import InspectionBounds, Inspector
from slora_api.core.data_dir import DataDir
from slora_api.core.foundation import Foundation
from slora_api.core.host_board import BoardSize, HostBoard, HostChanges
from slora_api.core.otel_tracing import OtelTracing
from slora_api.core.settings import Settings
from slora_api.http.http_protocol import ConnectionLimits
from slora_api.keys.key_record import Pepper, open_admin_key
from slora_api.keys.key_store import KeyStore, RevocationJournal
from slora_api.serve.app import make_app
from slora_api.serve.background import ChangeFollower
from slora_api.serve.composition import build_services, make_batch_runner
from slora_api.serve.services import Services
from slora_api.tenants.tenant_store import TenantStore
from tests.adapters.hand_made import SHAPE, make_members
from tests.api.adapters.hostile_uploads import FIELDS
from tests.api.live_server import live_server
from tests.api.scripted_engine import EOS, ScriptedEngine, byte_tokenizer, deltas_of
from tests.support.migrated_file import write_migrated_database

T = TypeVar("T")
ADMIN_KEY = "the-operators-own-key"
# Smaller than a server's reserve, so that a test can fill a disk without a reserve.
RESERVE_BYTES = 1 << 20


def make_sdk_client(url: str, key: str) -> openai.OpenAI:
    """The caller closes it. Otherwise a later test fails when the garbage collector finds its open socket."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def open_key_store(database: Database, directory: Path) -> KeyStore:
    """Keys. The pepper and the revocation journal are files in `directory`."""
    journal = RevocationJournal(directory / "revocations")
    return KeyStore(database, Pepper.from_file(directory / "pepper"), journal)


def open_tenant_store(database: Database, directory: Path) -> TenantStore:
    return TenantStore(database, open_key_store(database, directory))


@dataclass
class Platform:
    """A running API. `engine` decides the answers."""

    url: str
    engine: ScriptedEngine
    services: Services
    directory: Path
    # The clients by key, and what closes them and those of the openai package.
    clients: dict[str | None, httpx.Client] = field(default_factory=dict)
    at_end: ExitStack = field(default_factory=ExitStack)

    def find(self, kind: type[T]) -> T:
        """The object of this kind among those of the routes and of the background tasks."""
        owners = (getattr(work, "__self__", None) for work in self.services.work)
        return next(found for found in (*self.services.for_routes, *owners) if isinstance(found, kind))

    def says(self, text: str, reason: FinishReason = FinishReason.STOP) -> None:
        """Makes the text the answer to every request."""
        self.engine.answers = [deltas_of(text.encode(), reason)]

    def last_prompt(self) -> str:
        """The text of the last prompt that the engine received."""
        ids = self.engine.requests[-1].prompt_token_ids
        return b"".join(b"<eos>" if token == EOS else bytes([token]) for token in ids).decode()

    def api(self, key: str | None) -> httpx.Client:
        """A client that is closed at the end of the platform, with a key or without one. A new client for each request
        would take as long as the request."""
        if key not in self.clients:
            self.clients[key] = self.at_end.enter_context(self.client(key))
        return self.clients[key]

    def client(self, key: str | None) -> httpx.Client:
        """A client that the caller closes, or with it a stream."""
        # Loading CA certificates takes longer than most requests of these tests, and the tests use no TLS.
        headers = None if key is None else bearer(key)
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, verify=False)

    def sdk(self, key: str) -> openai.OpenAI:
        """A client of the openai package, closed at the end of the platform."""
        return self.at_end.enter_context(make_sdk_client(self.url, key))

    def key(self, tenant: str, adapter: str | None = None) -> str:
        """Creates a key, and the tenant if it does not exist."""
        tenant_store = self.services.tenant_store
        if tenant not in [known.name for known in tenant_store.list_tenants()]:
            tenant_store.create_tenant(tenant)
        return self.services.keys.admin.create_key(self.tenant_id(tenant), adapter)[1].secret

    def tenant_id(self, name: str) -> str:
        return self.services.tenant_store.find_named(name).tenant_id

    def upload(
        self,
        key: str,
        name: str,
        members: dict[str, bytes] | None = None,
        path: str = "/v1/adapters",
        **fields: str,
    ) -> httpx.Response:
        """Sends POST /v1/adapters with the files of an adapter, named as in a PEFT directory."""
        files = {FIELDS[file]: (file, raw) for file, raw in (members or make_members()).items()}
        return self.api(key).post(path, data={"name": name, **fields}, files=files)


def post(platform: Platform, key: str, path: str, body: Any) -> httpx.Response:
    return platform.api(key).post(path, json=body)


class TinyBase(BaseModelFiles):
    """A base model without files."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.directory, self.started_at = directory, 1
        self.name, self.tokenizer, self.shape = "base", byte_tokenizer(), SHAPE
        self.limits = AdapterLimits(
            max_lora_rank=settings.engine.max_lora_rank,
            max_tensor_bytes=settings.max_upload_bytes,
            vocab_size=257,
        )

    def base(self) -> BaseModelInfo:
        identity = BaseIdentity(self.directory, ("base", "tiny-base"))
        return BaseModelInfo(self.name, self.name, identity, GenerationDefaults(), 1)


@dataclass(frozen=True)
class InspectorInProcess:
    """Inspects uploads on a thread of this process. A process for each upload takes 0.3 s to start."""

    limits: AdapterLimits

    async def inspect(
        self, tenant: str, source: Path, scratch: Path, *, is_trusted: bool = False
    ) -> CheckedAdapter:
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
    chosen = replace(Settings(EngineConfig(Path("base"), max_lora_rank=max_lora_rank)), **settings)
    data, board, stack = DataDir(directory), HostBoard.create(BoardSize(1, 1000)), AsyncExitStack()
    reserve = DiskReserve(data.reserve, RESERVE_BYTES)
    if not chosen.database and not data.database.exists():
        write_migrated_database(data.database)
    database = Database(chosen.database or data.database, reserve)
    stack.callback(database.close)
    group, model = cast(ReplicaGroup, engine), TinyBase(directory / "base", chosen)
    inspector = InspectorInProcess(model.limits) if bounds is None else Inspector(SHAPE, model.limits, bounds)
    with patch.object(build, "Inspector", lambda *_: inspector):
        services = build_services(
            Foundation(stack, chosen, data, board, HostChanges(board), reserve, database, group), model
        )
    app = make_app(
        services, open_admin_key(ADMIN_KEY, directory, services.keys.store.pepper), tracing=tracing
    )
    platform = Platform("", engine, services, directory)
    background = []
    if follows:
        background += [platform.find(ChangeFollower).run, services.keys.running.run, services.pinning.run]
    if runs_batches:
        runner = make_batch_runner(services)
        runner.poll_s = 0.05
        background.append(runner.run)
    with live_server(app, background, at_end=stack.aclose, limits=connection_limits) as platform.url:
        # FastAPI builds its routes at the first request, which is not safe on two threads at once. A test may run two
        # platforms.
        httpx.get(platform.url + "/healthz", verify=False).raise_for_status()
        with platform.at_end:
            yield platform
