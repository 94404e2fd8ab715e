"""The identity of an adapter's weights: what pool pages, host copies, prefix keys and charges are filed
under.

Never a name and never a slot number: a name can be moved to other weights, a digest cannot. Two tenants that
upload the same weights have two versions; only bytes at rest may be shared between them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """`digest` is the lower-case hexadecimal SHA-256 that `digest.py` defines."""

    tenant: str
    digest: str
