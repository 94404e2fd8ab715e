"""Measured load times of adapters. They predict the cold start of an adapter that is not in the pool."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadPaces:
    """Seconds per byte of a packed adapter.

    pool: the copy from the host cache to the pool. With tensor parallelism, only the bytes of one rank count.
    host: the fetch to the host cache, by tier. A tier has an entry once an adapter was fetched from it. The bytes of
        all ranks count.
    """

    pool: float
    host: Mapping[str, float]

    def load_ms(self, num_bytes: int, tiers: Iterable[str], num_ranks: int = 1) -> dict[str, float | None]:
        """Milliseconds to load an adapter into the pool: from the host cache, and from each tier.

        num_bytes: the bytes of each tensor-parallel rank.

        None for a tier from which no adapter was fetched yet. Concurrent loads and decode steps make a load slower than
        this.

        Worked example: at 0.1 ns per byte into the pool and 1 ns per byte from a file, 100 MB take 10 ms from the host
        cache and 110 ms from a file.
        """
        pool_s = self.pool * num_bytes
        from_tiers = {
            tier: None
            if (byte_s := self.host.get(tier)) is None
            else _ms(byte_s * num_bytes * num_ranks + pool_s)
            for tier in tiers
        }
        return {"host": _ms(pool_s), **from_tiers}


def _ms(seconds: float) -> float:
    """Converts to milliseconds with three significant digits, because the measurement is not more accurate."""
    return float(f"{1e3 * seconds:.3g}")
