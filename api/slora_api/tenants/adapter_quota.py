"""How many versions of adapters one tenant may keep, and how large all of them together."""

from dataclasses import dataclass

from slora_adapters.peft.checked_adapter import CheckedAdapter
from slora_adapters.registry.registry import Holdings
from slora_api.errors import QuotaExceeded

__all__ = ["AdapterQuota"]


@dataclass(frozen=True, slots=True)
class AdapterQuota:
    """The same for every tenant. max_bytes: of tensors; versions with the same weights share theirs."""

    max_versions: int
    max_bytes: int

    def check(self, holdings: Holdings, name: str, adapter: CheckedAdapter) -> None:
        """Raises QuotaExceeded if a tenant with these may not have `adapter` as another version, of `name`, too."""
        if holdings.num_versions >= self.max_versions:
            raise QuotaExceeded(
                f"You have {holdings.num_versions} versions of adapters and may have {self.max_versions} "
                "(max_versions_per_tenant); remove one first."
            )
        sizes = {**holdings.sizes, adapter.digest: adapter.tensor_bytes}
        if (wanted := sum(sizes.values())) > self.max_bytes:
            raise QuotaExceeded(
                f"With the {adapter.tensor_bytes} bytes of `{name}` your adapters would take {wanted} bytes; they may "
                f"take {self.max_bytes} (max_adapter_bytes_per_tenant). Remove others first."
            )
