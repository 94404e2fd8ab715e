"""Moves, rolls back and deletes the aliases of tenants' adapters, such as `name@prod`.

A move is one transaction, so a request is served either by the old targets or by the new ones. A request that has
already started keeps its version. If the moved alias is pinned, the pin moves with it.

This module does not depend on HTTP. Its dictionaries are the JSON of the API.
"""

from slora_adapters.registry.record import LATEST, Rollout, Targets
from slora_adapters.registry.registry import Registry
from slora_api.adapters.adapter_json import AliasObject, alias_json
from slora_api.adapters.pinning import Pinning
from slora_api.core.threads import tenant_thread


class Aliases:
    """The aliases of all tenants. Each call sees only one tenant. A name or alias that does not exist raises
    AdapterNotFound.
    """

    def __init__(self, registry: Registry, pinning: Pinning) -> None:
        self._registry = registry
        self._pinning = pinning

    def list(self, tenant: str, name: str) -> list[AliasObject]:
        self._registry.rollout(tenant, f"{name}@{LATEST}")  # Raises AdapterNotFound for an unknown name.
        return [alias_json(rollout) for rollout in self._registry.aliases(tenant, name)]

    def describe(self, tenant: str, name: str, alias: str) -> AliasObject:
        return alias_json(self._registry.rollout(tenant, f"{name}@{alias}"))

    async def move(
        self,
        tenant: str,
        name: str,
        alias: str,
        targets: Targets,
        *,
        expected: Targets | None,
        follows_pushes: bool,
    ) -> AliasObject:
        """Moves or creates an alias. Raises the errors of `Registry.move`."""
        rollout = await tenant_thread(
            tenant,
            self._registry.move,
            tenant,
            name,
            alias,
            targets,
            expected=expected,
            follows_pushes=follows_pushes,
        )
        return self._moved(rollout)

    async def roll_back(self, tenant: str, name: str, alias: str) -> AliasObject:
        """Moves the alias back to its previous targets. Raises AliasConflict if it has none."""
        return self._moved(await tenant_thread(tenant, self._registry.roll_back, tenant, name, alias))

    async def delete(self, tenant: str, name: str, alias: str) -> None:
        """Deletes the alias. Raises BadAlias for `latest`."""
        self._moved(await tenant_thread(tenant, self._registry.delete_alias, tenant, name, alias))

    def _moved(self, rollout: Rollout) -> AliasObject:
        if rollout.pinned:
            self._pinning.refresh()
        return alias_json(rollout)
