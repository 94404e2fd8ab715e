"""The allow-list of an API key: the models that the key may use.

An entry is the name of the base model, the name of an adapter, which permits all its versions and aliases, or
`name@alias`, which permits that alias only. The reference that a request means is checked, after `default` has been
replaced by the key's default adapter. A model that is not permitted answers like one that does not exist.
"""

from dataclasses import dataclass

from slora_adapters.registry.reference import LATEST

__all__ = ["MAX_MODELS", "AllowList"]

# Listing the models of a key reads each of them.
MAX_MODELS = 100


@dataclass(frozen=True, slots=True)
class AllowList:
    """The entries of one list.

    entries: `name` permits an adapter with all its versions and aliases. `name@alias` permits that alias only; a bare
        name in a request counts as `name@latest`.
    """

    entries: frozenset[str]

    def permits(self, reference: str) -> bool:
        """Whether a model is permitted. reference: an adapter's `name`, `name@3` or `name@alias`, or the name of the
        base model.
        """
        name, _, target = reference.partition("@")
        return name in self.entries or f"{name}@{target or LATEST}" in self.entries

    def permits_whole(self, name: str) -> bool:
        """Whether all versions and aliases of an adapter are permitted."""
        return name in self.entries

    def names(self) -> list[str]:
        """Returns the names of adapters in the entries, sorted. The name of the base model may be among them."""
        return sorted({entry.partition("@")[0] for entry in self.entries})
