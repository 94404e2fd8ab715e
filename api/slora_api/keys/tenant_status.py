"""Whether a tenant is served."""

from enum import StrEnum


class TenantStatus(StrEnum):
    """ACTIVE: the tenant is served. SUSPENDED: its keys are refused until the operator resumes it. PURGING: its keys
    are refused, and a part of its data may already be deleted.
    """

    ACTIVE = "active"
    SUSPENDED = "suspended"
    PURGING = "purging"
