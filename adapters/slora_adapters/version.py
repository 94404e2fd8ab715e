"""The identity of an adapter's weights. It is the key of page pool pages, host copies, prefix keys and charges.

The identity is never a name or a slot number: a name can be moved to other weights, a digest cannot. Two tenants that
upload the same weights have two versions. Tenants may share stored bytes, and nothing else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """The weights of one tenant. digest: the lower-case hexadecimal SHA-256 that `digest.py` defines."""

    tenant: str
    digest: str
