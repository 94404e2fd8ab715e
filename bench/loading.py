"""What adapters that are not there yet cost, on a real server, over HTTP, with a real Redis.

    python -m bench.loading [--parts cold storm stream] [--quick] [--json FILE]

cold    the first token by tier (pool, host, file, Redis) for adapters of 10, 80 and 320 MB.
storm   32 cold adapters of 20 MB asked for at once, by one tenant and by eight.
stream  what those who decode notice while an adapter of 400 MB comes from Redis, and a PING of the same Redis.

Every claim is a ratio to what the plainest program took for the same in the same round (`bench.tier_rates`).
"""

from bench.cold_start import cold_start_tables
from bench.load_storm import storm_tables
from bench.load_stream import stream_tables
from bench.parts import Tables, run_parts


def cold_tables(*, quick: bool) -> Tables:
    return cold_start_tables(1 if quick else 5)


def storm_of_adapters(*, quick: bool) -> Tables:
    return storm_tables(1 if quick else 3)


def stream_of_an_adapter(*, quick: bool) -> Tables:
    return stream_tables(1 if quick else 3)


TABLES = {"cold": cold_tables, "storm": storm_of_adapters, "stream": stream_of_an_adapter}


if __name__ == "__main__":
    run_parts(__doc__, TABLES)
