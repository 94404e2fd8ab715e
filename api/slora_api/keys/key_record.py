"""The record of an API key: everything that the server knows about the key, except the secret. Each request has the
record of its key.
"""

from dataclasses import dataclass

from slora.core.request import TenantShare
from slora_api.core.errors import ModelNotFound
from slora_api.keys.allow_list import AllowList
from slora_api.keys.scopes import Scope
from slora_api.keys.tenant_status import TenantStatus

# The key id of the bootstrap key; see `admin_key.py`.
BOOTSTRAP_KEY_ID = "bootstrap"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A tenant's API key without its secret. Times are Unix times in seconds.

    tenant: the id of the tenant. tenant_name: its name when the key was read, for people.
    name: a label for people; may be empty.
    adapter: the default adapter, which `model="default"` selects; None selects the base model.
    models: None permits all models of the tenant.
    last_used_at: the last use, from the database, where it is updated at most once a minute.
    replaced_by: the id of the key that replaced this key in a rotation.
    share, status: the tenant's share and status when the key was read.
    """

    key_id: str
    tenant: str
    tenant_name: str
    name: str
    scopes: frozenset[Scope]
    adapter: str | None
    models: AllowList | None
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    revoked_at: int | None
    replaced_by: str | None
    share: TenantShare
    status: TenantStatus = TenantStatus.ACTIVE

    def check_model(self, reference: str) -> None:
        """Raises ModelNotFound if the key may not use this adapter or the base model."""
        if self.models is not None and not self.models.permits(reference):
            raise ModelNotFound(reference)

    def check_adapter(self, name: str) -> None:
        """Raises ModelNotFound unless the key may use every version and alias of the adapter. Only such a key may
        change the adapter.
        """
        if self.models is not None and not self.models.permits_whole(name):
            raise ModelNotFound(name)


@dataclass(frozen=True, slots=True)
class OperatorKey:
    """An operator's key without its secret. The fields have the same meaning as in `KeyRecord`.

    scopes: a subset of OPERATOR_SCOPES.
    """

    key_id: str
    name: str
    created_at: int
    expires_at: int | None = None
    last_used_at: int | None = None
    revoked_at: int | None = None
    replaced_by: str | None = None
    scopes: frozenset[Scope] = frozenset({Scope.ADMIN})

    @property
    def tenant(self) -> None:
        return None

    @property
    def tenant_name(self) -> None:
        return None


Caller = KeyRecord | OperatorKey
