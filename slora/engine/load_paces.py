"""How long adapters take to come, as measured lately: what a tenant may expect of one that is not in the pool."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadPaces:
    """Seconds a byte of a packed adapter. pool: from the host to the pool. host: to the host, by the kind of place that
    it comes from; only of those that one has come from."""

    pool: float
    host: Mapping[str, float]

    def load_ms(self, num_bytes: int, tiers: Iterable[str]) -> dict[str, float | None]:
        """Milliseconds until an adapter of so many bytes is in the pool, from the host and from each of the tiers; None
        for a tier that no adapter came from yet. Beside other loads and decode steps a load takes longer.

        Worked example: at 0.1 ns a byte into the pool and 1 ns from a file, 100 MB take 10 ms from the host and 110 ms
        from a file.
        """
        pool_s = self.pool * num_bytes
        from_tiers = {
            tier: None if (byte_s := self.host.get(tier)) is None else _ms(byte_s * num_bytes + pool_s)
            for tier in tiers
        }
        return {"host": _ms(pool_s), **from_tiers}


def _ms(seconds: float) -> float:
    """To three digits: more would promise too much."""
    return float(f"{1e3 * seconds:.3g}")
