"""The tenant that the path of an operator's request names."""

from typing import Annotated

from fastapi import Depends

from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator
from slora_api.tenants.tenant_store import Tenant, TenantStore


def _find(tenant: str, _operator: Operator, tenant_store: Wired[TenantStore]) -> Tenant:
    """Returns the tenant that the path names. Raises NotFound."""
    return tenant_store.find_named(tenant)


# Whatever a route does afterwards, it does with the id of the tenant, because the name may change meanwhile.
NamedTenant = Annotated[Tenant, Depends(_find)]
