"""The identity of an adapter's weights. It is the key of page pool pages, host copies, prefix keys and charges.

The identity is never a name or a slot number: a name can be moved to other weights, a digest cannot. If two tenants
upload the same weights, each tenant has an AdapterVersion of its own. Tenants may share stored bytes, and nothing else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One adapter's weights, as one tenant has them. A numbered version of a name (`AdapterRecord`) refers to them.

    digest: the lower-case hexadecimal SHA-256 that `digest.py` defines.
    """

    tenant: str
    digest: str

    @property
    def label(self) -> str:
        """Tenant and shortened digest, as metrics and log lines show them."""
        return f"{self.tenant}/{self.digest[:12]}"
