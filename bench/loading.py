"""What adapters that are not there yet cost, on a real server, over HTTP, with a real Redis.

    python -m bench.loading [--parts cold storm stream many] [--quick] [--json FILE]

cold    the first token by tier (pool, host, file, Redis) for adapters of 10, 80 and 320 MB.
storm   32 cold adapters of 20 MB asked for at once, by one tenant and by eight.
stream  what those who decode notice while an adapter of 400 MB comes from Redis, and a PING of the same Redis.
many    a start, a page of the list and one name looked up, with 10, 500 and 5,000 registered adapters, in SQLite and in
        Redis.

Figures are ratios within one run: to what the plainest program takes for the same bytes (`bench.tier_rates`), to the
same without the load, to the same with few adapters.
"""

from bench.cold_start import cold_start_tables
from bench.load_storm import storm_tables
from bench.load_stream import stream_tables
from bench.many_adapters import many_tables
from bench.parts import Tables, run_parts


def cold_tables(*, quick: bool) -> Tables:
    return cold_start_tables(1 if quick else 5)


def storm_of_adapters(*, quick: bool) -> Tables:
    return storm_tables(1 if quick else 3)


def stream_of_an_adapter(*, quick: bool) -> Tables:
    return stream_tables(1 if quick else 3)


def many_adapters(*, quick: bool) -> Tables:
    return many_tables(1, (10, 500)) if quick else many_tables(3)


TABLES = {
    "cold": cold_tables,
    "storm": storm_of_adapters,
    "stream": stream_of_an_adapter,
    "many": many_adapters,
}


if __name__ == "__main__":
    run_parts(__doc__, TABLES)
