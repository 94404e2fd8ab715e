"""The identity of an adapter's weights: a tenant and a digest.

Pages, host copies, the prefix cache and charges refer to an adapter by this identity, never by a name or a slot number.
A name can be moved to other weights, but a digest always identifies the same weights. If two tenants upload the same
weights, each tenant has an AdapterVersion of its own. Tenants may share stored bytes, and nothing else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """The weights of an adapter that belongs to one tenant. A numbered version of a name (`AdapterRecord`) refers to
    these weights.
    """

    tenant: str
    digest: str  # 64 lower-case hexadecimal digits, which `peft/adapter.py` defines

    @property
    def label(self) -> str:
        """The tenant and the shortened digest, for metrics and log lines."""
        return f"{self.tenant}/{self.digest[:12]}"
