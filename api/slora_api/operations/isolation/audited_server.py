"""The server under audit, and the two tenants and the adapters that exist only during an audit."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx
import numpy as np

# NumPy would import this module on first use, and that import swallows a KeyboardInterrupt.
from numpy.random import default_rng
from safetensors.numpy import save

from slora_api.cli.remote import CommandFailed, check

# With alpha 16, the adapter adds about 0.8 to the outputs of the modules. This changes the answers of a model in
# bfloat16, and is far from overflow.
_ALPHA, _B_SCALE = 16, 0.05


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """A small random adapter that the server accepts."""

    config: bytes
    weights: bytes

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """Returns the multipart files of an upload."""
        return {
            "config": ("adapter_config.json", self.config),
            "weights": ("adapter_model.safetensors", self.weights),
        }


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


def make_adapter(modules: list[Mapping[str, Any]], seed: int) -> RandomAdapter:
    """Makes an adapter of rank 1 for all modules of the first kind, such as all q_proj.

    modules: the answer of GET /v1/adapter-modules.
    """
    name = _last_name(modules[0])
    random = default_rng(seed)
    tensors = {}
    for module in modules:
        if _last_name(module) == name:
            path, width, height = module["path"], module["in_features"], module["out_features"]
            a = random.standard_normal((1, width), np.float32) / np.sqrt(width, dtype=np.float32)
            b = random.standard_normal((height, 1), np.float32) * np.float32(_B_SCALE)
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": _ALPHA, "target_modules": [name]}
    return RandomAdapter(json.dumps(config).encode(), save(tensors))


def _last_name(module: Mapping[str, Any]) -> str:
    name: str = module["path"].rpartition(".")[2]
    return name
