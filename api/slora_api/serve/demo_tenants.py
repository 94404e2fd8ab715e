"""The tenants of a demo: one with an API key for each demo adapter, and a further one for the base model.

The keys are random and are stored in the data directory (mode 0600), so a restart prints the same keys. Only the demo
stores keys in clear text. The adapters are published like any upload.
"""

import asyncio
import json
import logging
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slora.core.errors import ConfigError, EngineUnavailable
from slora_adapters.process.durable_file import replace_durably
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import StagedUpload
from slora_api.core.errors import Conflict, InspectionFailed, ServerBusy
from slora_api.core.threads import control_thread
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import make_key
from slora_api.serve.demo import Demo, DemoAdapter
from slora_api.tenants.tenant_store import TenantStore

logger = logging.getLogger(__name__)

_BASE_TENANT = "base"
_RETRY_S = 0.5
_MAX_CHECKS = 3


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """A tenant of the demo. adapter: its adapter; None if the tenant uses the base model."""

    tenant_id: str
    name: str
    adapter: DemoAdapter | None
    key: str

    def __repr__(self) -> str:
        return f"DemoTenant({self.name!r}, '***')"


def _read_keys(path: Path) -> dict[str, str]:
    try:
        keys: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return keys


def _make_tenants(
    tenant_store: TenantStore, key_admin: KeyAdmin, keys_path: Path, adapters: Sequence[DemoAdapter]
) -> list[DemoTenant]:
    wanted: dict[str, DemoAdapter | None] = {_BASE_TENANT: None, **{one.name: one for one in adapters}}
    keys = _read_keys(keys_path)
    keys |= {tenant: make_key().secret for tenant in wanted if tenant not in keys}
    # Write the keys before they become valid. Otherwise, a crash could leave a valid key that is stored nowhere.
    replace_durably(keys_path, json.dumps(keys, indent=2).encode())
    tenants = []
    for name, adapter in wanted.items():
        with suppress(Conflict):  # An earlier start has created the tenant.
            tenant_store.create_tenant(name)
        tenant_id = tenant_store.find_named(name).tenant_id
        key_admin.import_key(tenant_id, None if adapter is None else name, keys[name])
        tenants.append(DemoTenant(tenant_id, name, adapter, keys[name]))
    return tenants


async def set_up_demo(
    demo: Demo,
    tenant_store: TenantStore,
    key_admin: KeyAdmin,
    publisher: Publisher,
    keys_path: Path,
    await_engine: Callable[[], Awaitable[None]],
) -> list[DemoTenant]:
    """Creates the demo's tenants, API keys and adapters if they do not exist yet.

    await_engine: see `Publisher.publish`. The adapters are inspected while the engine starts.
    """
    tenants = await control_thread(_make_tenants, tenant_store, key_admin, keys_path, demo.adapters)
    uploads = (
        _publish(tenant.tenant_id, tenant.adapter.directory, demo.fingerprint, publisher, await_engine)
        for tenant in tenants
        if tenant.adapter is not None
    )
    await asyncio.gather(*uploads)
    return tenants


async def _publish(
    tenant: str,
    path: Path,
    base_fingerprint: str | None,
    publisher: Publisher,
    await_engine: Callable[[], Awaitable[None]],
) -> None:
    """Publishes one adapter. Retries while the engine is away, or no process can be started that compiles its template.

    Both may only be for a moment, and an error would end the server. A check that does not finish is tried again, too,
    but not without end. Raises ConfigError then.
    """
    has_warned, num_failed = False, 0
    while True:
        try:
            upload = StagedUpload(path.name, path, base_fingerprint, is_trusted=True)
            await publisher.publish(tenant, upload, await_engine=await_engine)
        except (EngineUnavailable, ServerBusy) as error:
            if not has_warned:
                logger.warning("the demo's adapter %s cannot be published yet: %s", path.name, error)
            has_warned = True
            await asyncio.sleep(_RETRY_S)
        except InspectionFailed as error:
            num_failed += 1
            if num_failed == _MAX_CHECKS:
                raise ConfigError(
                    f"the demo's adapter {path.name} could not be checked in {num_failed} attempts: {error} Stop other "
                    "programs if the machine is busy or short of memory, and start the demo again; it goes on where it "
                    "stopped"
                ) from None
            logger.warning("the demo's adapter %s is checked again: %s", path.name, error)
        else:
            return


def describe_demo(url: str, tenants: Sequence[DemoTenant], keys_path: Path, *, shows_keys: bool) -> str:
    """Returns the text that a new user reads: a table of the tenants, and a command to paste.

    shows_keys: whether the text has the keys. Otherwise, it says where they are.
    """
    rows = [("tenant", "what its adapter does", "key")]
    for one in tenants:
        rows.append(
            (one.name, one.adapter.summary if one.adapter else "has no adapter: the base model", one.key)
        )
    names, summaries = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [""]
    for name, summary, key in rows:
        lines.append(f"{name:{names}}  {summary:{summaries}}  {key if shows_keys else ''}".rstrip())
    shown = next((one for one in tenants if one.adapter and one.adapter.prompt), tenants[0])
    prompt = shown.adapter.prompt if shown.adapter else "hello"
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}]}
    key = shown.key if shows_keys else "$SLORA_API_KEY"
    quote = "'" if shows_keys else '"'
    if not shows_keys:
        lines += ["", f"Their keys are in {keys_path}. With that of {shown.name} in SLORA_API_KEY:"]
    lines += [
        "",
        f"curl -s {url}/v1/chat/completions -H {quote}Authorization: Bearer {key}{quote} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
    ]
    return "\n".join(lines)
