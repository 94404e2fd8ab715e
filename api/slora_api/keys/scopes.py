"""Scopes limit the use of a key. Each route names the scope that it needs; see `authentication.py`."""

from collections.abc import Iterable, Set
from enum import StrEnum

from slora_api.core.errors import BadRequest


class Scope(StrEnum):
    INFERENCE = "inference"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"
    USAGE_READ = "usage:read"
    METRICS_READ = "metrics:read"
    ADMIN = "admin"


# The scopes that an operator's key may have. ADMIN includes METRICS_READ. A tenant's key can have neither, because the
# metrics show the traffic of all tenants.
OPERATOR_SCOPES = frozenset({Scope.ADMIN, Scope.METRICS_READ})
TENANT_SCOPES = frozenset(Scope) - OPERATOR_SCOPES


def parse_scopes(
    names: Iterable[str], param: str, known_scopes: Set[Scope] = TENANT_SCOPES
) -> frozenset[Scope]:
    """Returns the scopes of a new key. known_scopes: TENANT_SCOPES or OPERATOR_SCOPES.

    Raises BadRequest naming `param` and the scope that is refused.
    """
    wanted = list(names)
    known = ", ".join(f"`{scope}`" for scope in Scope if scope in known_scopes)
    if not wanted:
        raise BadRequest(
            f"`{param}` is empty, so the key could do nothing; name at least one of {known}.", param
        )
    for name in wanted:
        if name in OPERATOR_SCOPES - known_scopes:
            raise BadRequest(
                f"`{param}` contains `{name}`, which a tenant's key cannot have; create an operator's key with POST "
                "/admin/keys.",
                param,
            )
        if name not in known_scopes:
            raise BadRequest(f"`{param}` contains {name[:64]!r}, which is not a scope; use {known}.", param)
    return frozenset(map(Scope, wanted))


def join_scopes(scopes: Iterable[Scope]) -> str:
    """Returns the scopes as the database stores them: sorted and separated by spaces."""
    return " ".join(sorted(scopes))


def split_scopes(text: str) -> frozenset[Scope]:
    """Returns the scopes that the database stores. Scopes that a newer release has added are left out."""
    return frozenset(scope for scope in Scope if scope in text.split())
