"""What one paged pool for KV and adapters is worth: real bytes, requests at once, sharing, and giving way.

    python -m bench.memory [--parts pool sharing swap] [--quick] [--json FILE]

pool     S-LoRA's S2 trace (ranks 64/32/16/8, 200 adapters, 2 requests/s for 300 s) on the memory of its A10G setting,
         14,500 tokens of KV. "taken" is what running requests and their adapters hold; "useful" the bytes of real
         token states and of real adapters. Means over the time in which somebody waits, the first 30 s aside. Static
         splits are chosen in hindsight: the adapter part with which most ran at once, of all that were tried.
sharing  KV pages saved by parallel sampling and by beam search, beside the PagedAttention paper's figures, and what
         other ways to count the same would give. Lengths are synthetic with the paper's means (see
         bench/simulation/lengths.py); what beams propose is random, in its two extremes and in between (see
         bench/simulation/next_tokens.py).
swap     bringing back a preempted sequence by copying its pages or by computing it again, over block sizes.

All but the copies of "swap" are simulated: the production scheduler plans every step, nothing is computed.
"""

from bench.machines import A10G_7B
from bench.parts import Tables, run_parts
from bench.pool_division import Division, compare, s2_division, shifting_trace
from bench.sharing import counting_rows, sharing_rows
from bench.simulation.traces import S2
from bench.swapping import swap_rows


def pool_tables(*, quick: bool) -> Tables:
    duration, step = (60.0, 1024) if quick else (300.0, 256)
    s2 = s2_division(A10G_7B, 200, 2, duration)
    tables = {"S2 on an A10G's memory": compare(s2, step)}
    if not quick:
        shifting = Division(A10G_7B, S2, shifting_trace(200, 2, duration))
        tables["the same with popularity that shifts (alpha 1 and 0.1 in turn)"] = compare(shifting, step)
    return tables


def sharing_tables(*, quick: bool) -> Tables:
    count, counted = (10, 50) if quick else (200, 1000)
    return {
        f"pages saved by sharing, searches of {count} requests": sharing_rows(count),
        f"pages saved by sampling, % of those of {counted} requests, by what is counted": counting_rows(
            counted
        ),
    }


def swap_tables(*, quick: bool) -> Tables:
    pool_bytes, repeats = (64 << 20, 3) if quick else (512 << 20, 21)
    tokens = (256,) if quick else (256, 1024)
    return {f"bringing back {count} tokens": swap_rows(count, pool_bytes, repeats) for count in tokens}


TABLES = {"pool": pool_tables, "sharing": sharing_tables, "swap": swap_tables}


if __name__ == "__main__":
    run_parts(__doc__, TABLES)
