"""Demo mode: a tenant with an API key for each demo adapter, and a further tenant for the base model.

The keys are random and are stored in the data directory (mode 0600), so a restart prints the same keys. Only the demo
stores keys in clear text. The adapters are published like any upload.
"""

import asyncio
import json
import logging
import shlex
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slora.core.errors import ConfigError, EngineUnavailable
from slora_adapters.process.durable_file import replace_durably
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import StagedUpload
from slora_api.core.errors import Conflict
from slora_api.core.threads import control_thread
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import make_key
from slora_api.tenants.tenant_store import TenantStore

logger = logging.getLogger(__name__)

_BASE_TENANT = "base"
_PROMPT = "the quick brown fox"
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """A tenant of the demo. adapter: its adapter; None if the tenant uses the base model."""

    tenant_id: str
    name: str
    adapter: str | None
    key: str

    def __repr__(self) -> str:
        return f"DemoTenant({self.name!r}, {self.adapter!r}, '***')"


def find_demo_directory() -> Path:
    """Returns the directory of the demo: in the checkout that this code runs from, or else where the wheel installed
    it.

    Raises ConfigError if there is neither.
    """
    checkout = Path(__file__).parents[3] / "demo"
    installed = Path(sysconfig.get_path("data")) / "share" / "slora" / "demo"
    for directory in (checkout, installed):
        if (directory / "model" / "config.json").is_file():
            return directory
    raise ConfigError(
        f"the demo is neither at {checkout} nor at {installed}; install slora from its wheel or a checkout"
    )


def find_demo_adapters(directory: Path) -> list[Path]:
    """Returns the directories of the demo's adapters. Raises ConfigError if there are none."""
    found = sorted(path.parent for path in directory.glob("*/adapter_config.json"))
    if not found:
        raise ConfigError(f"{directory} contains no adapters; a demo has DIR/model and DIR/adapters/NAME")
    return found


def _read_keys(path: Path) -> dict[str, str]:
    try:
        keys: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return keys


def _make_tenants(
    tenant_store: TenantStore, key_admin: KeyAdmin, keys_path: Path, adapters: Iterable[str]
) -> list[DemoTenant]:
    wanted: dict[str, str | None] = {_BASE_TENANT: None, **{name: name for name in adapters}}
    keys = _read_keys(keys_path)
    keys |= {tenant: make_key().secret for tenant in wanted if tenant not in keys}
    # Write the keys before they become valid. Otherwise, a crash could leave a valid key that is stored nowhere.
    replace_durably(keys_path, json.dumps(keys, indent=2).encode())
    tenants = []
    for name, adapter in wanted.items():
        with suppress(Conflict):  # An earlier start has created the tenant.
            tenant_store.create_tenant(name)
        tenant_id = tenant_store.find_named(name).tenant_id
        key_admin.import_key(tenant_id, adapter, keys[name])
        tenants.append(DemoTenant(tenant_id, name, adapter, keys[name]))
    return tenants


async def set_up_demo(
    adapters: Sequence[Path],
    tenant_store: TenantStore,
    key_admin: KeyAdmin,
    publisher: Publisher,
    keys_path: Path,
) -> list[DemoTenant]:
    """Creates the demo's tenants, API keys and adapters if they do not exist yet. This needs a running engine, because
    all uploads do.
    """
    names = [path.name for path in adapters]
    tenants = await control_thread(_make_tenants, tenant_store, key_admin, keys_path, names)
    ids = {tenant.name: tenant.tenant_id for tenant in tenants}
    for path in adapters:
        await _publish(ids[path.name], path, publisher)
    return tenants


async def _publish(tenant: str, path: Path, publisher: Publisher) -> None:
    """Publishes one adapter. If the engine dies during the upload, retries until a new engine accepts the adapter."""
    has_warned = False
    while True:
        try:
            await publisher.publish(tenant, StagedUpload(path.name, path))
        except EngineUnavailable as error:
            if not has_warned:
                logger.warning("the demo's adapter %s cannot be published yet: %s", path.name, error)
            has_warned = True
            await asyncio.sleep(_RETRY_S)
        else:
            return


def describe_demo(url: str, tenants: Sequence[DemoTenant]) -> str:
    """Returns the text that a new user reads: a command line to paste for each API key, and the URL that opens the
    console as the last tenant. The URL has the key in its fragment, which browsers never send to a server.
    """
    lines = ["", "The same prompt and the same base model with the adapter of each key:"]
    body = {"model": "default", "messages": [{"role": "user", "content": _PROMPT}], "temperature": 0}
    for tenant in tenants:
        means = f"adapter {tenant.adapter}" if tenant.adapter else "no adapter: the base model"
        lines += [
            "",
            f"# tenant {tenant.name}, {means}",
            f"curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {tenant.key}' "
            f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
        ]
    shown = tenants[-1]
    lines += ["", f"The console, signed in as tenant {shown.name}: {url}/console#key={shown.key}"]
    return "\n".join(lines)
