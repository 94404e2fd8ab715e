"""What the scheduler costs and what its choices bring.

    python -m bench.scheduler [--parts overhead batching fairness abort cold] [--quick] [--json FILE]

overhead  schedule(), the batch and postprocess() of one step with 256 running and 1,000 waiting requests of 200 tenants
          and adapters, over running requests and over adapters that the engine has heard of; one page taken and given
          back. CPU time of one thread.
batching  the same requests under static, dynamic (size and time window) and continuous batching.
abort     S-LoRA's early abort at twice the capacity, with unknown and with true lengths of the answers.
fairness  shares of the service: two backlogged tenants of which one sends ten times as much, one that is back from
          idle, 100 adapters against one. What short requests wait for beside another tenant's long prompts.
cold      tokens of those who decode, while an adapter that nobody had asked for comes every 100 ms at 20 MB/s;
          the same with the real engine of a small model.

Simulated on S-LoRA's A10G setting, with virtual time, but for "overhead" and the last table of "cold".
"""

from bench.batching import batching_rows
from bench.cold_adapters import cold_rows
from bench.early_abort import abort_rows
from bench.fairness import fairness_rows, flood_rows
from bench.live_cold_adapters import live_cold_rows
from bench.overhead import page_rows, schedule_rows
from bench.parts import Tables, run_parts


def overhead_tables(*, quick: bool) -> Tables:
    steps, repeats = (20, 2_000) if quick else (300, 200_000)
    return {"one step": schedule_rows(steps, quick=quick), "one page": page_rows(repeats)}


def batching_tables(*, quick: bool) -> Tables:
    return {"batching, S2 on an A10G": batching_rows(30.0 if quick else 300.0)}


def fairness_tables(*, quick: bool) -> Tables:
    duration_s = 60.0 if quick else 300.0
    return {
        "shares of service": fairness_rows(duration_s),
        "short requests beside long prompts": flood_rows(duration_s),
    }


def abort_tables(*, quick: bool) -> Tables:
    return {"early abort, S2 on an A10G at twice its capacity": abort_rows(30.0 if quick else 300.0)}


def cold_tables(*, quick: bool) -> Tables:
    return {
        "decoding beside a cold adapter every 100 ms, from afar": cold_rows(400 if quick else 1000),
        "the same, measured": live_cold_rows(30 if quick else 400, 1 if quick else 3),
    }


TABLES = {
    "overhead": overhead_tables,
    "batching": batching_tables,
    "fairness": fairness_tables,
    "abort": abort_tables,
    "cold": cold_tables,
}


if __name__ == "__main__":
    run_parts(__doc__, TABLES)
