"""The least time that adapters can add to a run of the bare base, and the least that one decode step takes.

    floor = the base's own time + bytes of the distinct adapters, read once for each output token, over the read rate
            + the adapters' multiplications over the matmul rate

Bytes and multiplications could overlap, and a prompt's chunks read adapters more often than once: so it is neither
quite reachable nor loose. 32 adapters of 9.8 MB at 33 GB/s: 9.5 ms a step.
"""

from collections.abc import Sequence

from bench.machine_rates import MachineRates
from bench.workload import RANKS, SMALL


def adapter_numbers(index: int) -> int:
    """Weights in the adapter that `workload.write_adapter` gives this index."""
    return SMALL.layers * RANKS[index % len(RANKS)] * sum(sum(shape) for shape in SMALL.widths.values())


def read_weight_numbers() -> int:
    """Weights of the base that a decode step reads: all but the embedding, of which it reads single rows."""
    linears = sum(rows * columns for rows, columns in SMALL.widths.values())
    return SMALL.layers * linears + SMALL.vocab * SMALL.hidden


def adapters_s(
    given: Sequence[int | None],
    input_tokens: int,
    output_tokens: int,
    element_bytes: int,
    rates: MachineRates,
) -> float:
    """What the floor adds to the base. given: the adapter's index of each request."""
    numbers = [0 if index is None else adapter_numbers(index) for index in given]
    distinct = {index for index in given if index is not None}
    num_bytes = element_bytes * sum(adapter_numbers(index) for index in distinct) * output_tokens
    flops = 2 * sum(numbers) * (input_tokens + output_tokens - 1)
    return num_bytes / rates.read_bytes_per_s + flops / rates.flops


def single_step_s(element_bytes: int, rates: MachineRates) -> float:
    """One decode step of one request: nothing but reading the weights."""
    return element_bytes * read_weight_numbers() / rates.read_bytes_per_s
