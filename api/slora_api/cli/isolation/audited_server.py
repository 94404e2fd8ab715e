"""The server under audit, and the two tenants that exist only during an audit."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from slora_api.cli.isolation.random_adapter import RandomAdapter
from slora_api.cli.remote import CommandFailed, check

__all__ = ["AuditedServer", "AuditedTenant", "audited_tenants"]


@dataclass(frozen=True, slots=True)
class AuditedServer:
    """The server under audit. client: an HTTP client without a default key."""

    client: httpx.Client
    admin_key: str = field(repr=False)

    def send(
        self,
        method: str,
        path: str,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        **sent: Any,
    ) -> httpx.Response:
        own = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.request(method, path, headers={**own, **(headers or {})}, **sent)

    def manage(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Sends a request with the admin key and returns the JSON of the answer. Raises CommandFailed."""
        return check(self.send(method, path, self.admin_key, json=body))

    def complete(self, key: str, model: str, prompt: str, max_tokens: int = 1) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.send("POST", "/v1/completions", key, json=body)


@dataclass(frozen=True, slots=True)
class AuditedTenant:
    """A temporary tenant. key: a key with all scopes of a tenant. revoked_key: a key that was valid before it was
    revoked.
    """

    server: AuditedServer
    name: str
    key: str = field(repr=False)
    revoked_key: str = field(repr=False)

    def make_key(self, scopes: Sequence[str] | None = None) -> str:
        body = {} if scopes is None else {"scopes": list(scopes)}
        key: str = self.server.manage("POST", f"/admin/tenants/{self.name}/keys", body)["key"]
        return key

    def upload(self, name: str, adapter: RandomAdapter) -> Any:
        """Uploads an adapter and returns the JSON of the answer. Raises CommandFailed."""
        return check(
            self.server.send("POST", "/v1/adapters", self.key, data={"name": name}, files=adapter.files())
        )


@contextmanager
def audited_tenants(server: AuditedServer) -> Iterator[tuple[AuditedTenant, AuditedTenant]]:
    """Creates two tenants and removes them at the end, even after a failure or an interrupt."""
    run = secrets.token_hex(4)
    with ExitStack() as stack:
        tenants = []
        for letter in "ab":
            name = f"audit-{run}-{letter}"
            # Register the removal first, so that an interrupt right after the creation still removes the tenant.
            stack.callback(_remove, server, name)
            tenants.append(_create(server, name))
        yield tenants[0], tenants[1]


def _create(server: AuditedServer, name: str) -> AuditedTenant:
    server.manage("POST", "/admin/tenants", {"name": name})
    keys = [server.manage("POST", f"/admin/tenants/{name}/keys", {}) for _ in range(2)]
    server.manage("DELETE", f"/admin/keys/{keys[1]['key_id']}")
    return AuditedTenant(server, name, keys[0]["key"], keys[1]["key"])


def _remove(server: AuditedServer, name: str) -> None:
    """Purges the tenant if it exists. On failure, raises a CommandFailed that names the tenant."""
    if server.send("GET", f"/admin/tenants/{name}", server.admin_key).status_code == HTTPStatus.NOT_FOUND:
        return
    try:
        server.manage("POST", f"/admin/tenants/{name}/purge", {"confirm": name, "ledger": "erase"})
    except CommandFailed as failure:
        raise CommandFailed(
            f"the temporary tenant {name} could not be removed: {failure}; run slora tenant purge {name}"
        ) from None
