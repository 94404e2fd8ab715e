"""Whether a tenant is served."""

from enum import StrEnum

__all__ = ["TenantStatus"]


class TenantStatus(StrEnum):
    """ACTIVE: the tenant is served. SUSPENDED: its keys are refused until the operator resumes it. PURGING: a part of
    what it had may be deleted already, and its keys are refused.
    """

    ACTIVE = "active"
    SUSPENDED = "suspended"
    PURGING = "purging"
