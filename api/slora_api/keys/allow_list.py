"""The allow-list of an API key: the models that the key may use.

There are three kinds of entries. The name of the base model permits the base model. The name of an adapter permits all
its versions and aliases. `name@alias` permits only this alias.

If a request names the model `default`, the key's default adapter is checked. The error for a model that is not
permitted is the same as for an unknown model.
"""

from dataclasses import dataclass

from slora_adapters.registry.record import LATEST

# The maximum number of entries. The number is limited, because listing the models of a key reads each entry's model
# from the database.
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
        """Returns the names of adapters in the entries, sorted. The name of the base model may be among these names."""
        return sorted({entry.partition("@")[0] for entry in self.entries})
