"""Swap against recompute: what it takes to bring a preempted sequence back, over block sizes.

swap      its pages to the host and back. Ours is one copy a page, since a page is contiguous over all layers; "by
          layer" is what a cache with K and V of each layer apart does, two copies a layer and page.
recompute prefill of all its tokens.

On the A10G a copy costs `COPY_LAUNCH_S` and its bytes at PCIe speed, by arithmetic. On this machine pages are really
copied, between two arrays far larger than its caches, beside the prefill time of the 110M model.
"""

import statistics
import time

import numpy as np
import numpy.typing as npt

from bench.machines import A10G_7B, CPU_110M
from bench.simulation.machine import Machine
from bench.table import Row

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Issuing one asynchronous copy: about 10 us on CUDA, which the bytes of small blocks do not outweigh.
COPY_LAUNCH_S = 10e-6
PCIE_BYTES_PER_S = 12e9
ByteArray = npt.NDArray[np.uint8]


def swap_rows(num_tokens: int, pool_bytes: int, repeats: int) -> list[Row]:
    """num_tokens: of the sequence. pool_bytes: of the array whose pages are copied here."""
    rows = []
    for block_tokens in BLOCK_SIZES:
        num_pages = -(-num_tokens // block_tokens)
        gpu = A10G_7B.costs.prefill_s(num_tokens)
        ours = _modelled_s(A10G_7B, block_tokens, num_pages, copies=1)
        by_layer = _modelled_s(A10G_7B, block_tokens, num_pages, copies=2 * A10G_7B.shape.num_layers)
        measured = _measured_s(block_tokens, num_pages, pool_bytes, repeats, copies=1)
        measured_by_layer = _measured_s(
            block_tokens, num_pages, pool_bytes, repeats, copies=2 * CPU_110M.shape.num_layers
        )
        rows.append(
            {
                "block": block_tokens,
                "A10G recompute ms": 1e3 * gpu,
                "swap ms": 1e3 * ours,
                "by layer ms": 1e3 * by_layer,
                "cheaper": "swap" if ours < gpu else "recompute",
                "CPU recompute ms": 1e3 * CPU_110M.costs.prefill_s(num_tokens),
                "swap (measured) ms": 1e3 * measured,
                "by layer (measured) ms": 1e3 * measured_by_layer,
            }
        )
    return rows


def _modelled_s(machine: Machine, block_tokens: int, num_pages: int, copies: int) -> float:
    """Out and in. copies: of each page."""
    page_bytes = block_tokens * machine.token_bytes
    return 2 * num_pages * (copies * COPY_LAUNCH_S + page_bytes / PCIE_BYTES_PER_S)


def _measured_s(block_tokens: int, num_pages: int, pool_bytes: int, repeats: int, copies: int) -> float:
    """The median of `repeats` swaps of pages that lie scattered; each page is copied in `copies` pieces."""
    piece_bytes = block_tokens * CPU_110M.token_bytes // copies
    pool = np.ones((pool_bytes // piece_bytes // copies, copies, piece_bytes), np.uint8)
    host = np.zeros_like(pool)
    random = np.random.default_rng(0)
    seconds = []
    for _ in range(repeats):
        pages = random.choice(len(pool), num_pages, replace=False).tolist()
        places = random.choice(len(host), num_pages, replace=False).tolist()
        start = time.perf_counter()
        _copy(pool, host, pages, places)
        _copy(host, pool, places, pages)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _copy(source: ByteArray, target: ByteArray, pages: list[int], places: list[int]) -> None:
    pieces = range(source.shape[1])
    for page, place in zip(pages, places, strict=True):
        from_page, to_page = source[page], target[place]
        for piece in pieces:
            to_page[piece] = from_page[piece]
