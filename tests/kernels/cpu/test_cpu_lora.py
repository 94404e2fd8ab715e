import time
from array import array
from threading import Thread

import pytest
import torch

from slora_kernels.cpu.kernels import CpuKernels
from slora_kernels.cpu.lora_plan import DeferredShrink, LoraPlan
from slora_kernels.cpu.machine_code import LORA, find_worker, has_workers
from slora_kernels.cpu.thread_team import ThreadTeam
from slora_kernels.cpu.worker_sizes import FIELD_WORDS, NEXT_ITEM, NUM_ITEMS, NUM_WORDS
from slora_kernels.layout import llama_shape
from slora_kernels.torch import reference
from tests.kernels.scenes import build_adapters, build_tiles, check_close

pytestmark = pytest.mark.skipif(not has_workers(), reason="there is neither machine code nor numba")
# The field of a job with the number of items that shrink.
NUM_SHRINK_ITEMS = 3


def test_expand_waits_for_the_shrink_of_other_threads() -> None:
    shape = llama_shape(1, 64, 2, 2, 16, 128, 300, 4)
    scene = build_adapters(shape, torch.float32, [[8] * 7 + [0, 0]] * 2)
    tiles = build_tiles([(0, 0, 3), (1, 3, 4)], scene.tables)
    site = shape.sites[0]
    x, out = torch.randn(7, 64), torch.zeros(7, sum(site.widths))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # With one thread, the tiles would not be cut.
    plan = LoraPlan(tiles, scene.tables, lambda numbers: torch.empty(2, numbers))
    torch.set_num_threads(threads)
    job, _ = plan.make_job(out, DeferredShrink(x), scene.pages, site)
    shrinks_at = NUM_WORDS + FIELD_WORDS * NUM_SHRINK_ITEMS
    num_shrinks = job[shrinks_at]
    # Simulates another thread that has taken the first block of the first tile and is delayed.
    missing = array("q", job)
    job[NEXT_ITEM] = 1
    missing[NUM_ITEMS] = missing[shrinks_at] = 1
    worker, team = (
        find_worker(LORA, "float32"),
        ThreadTeam(),
    )
    thread = Thread(target=team.run, args=(worker, job, 1))
    thread.start()
    while thread.is_alive() and job[NEXT_ITEM] <= num_shrinks:
        time.sleep(0.001)
    time.sleep(0.05)
    assert job[NEXT_ITEM] == num_shrinks + 1 and not out.any()
    team.run(worker, missing, 1)
    thread.join()
    expected = torch.zeros_like(out)
    shrunk = reference.shrink(x, scene.pages, scene.tables, site, tiles)
    reference.expand(expected, shrunk, scene.pages, scene.tables, site, tiles)
    check_close(out, expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    shape = llama_shape(2, 512, 4, 2, 64, 1024, 300, dtype.itemsize)
    scene = build_adapters(shape, dtype, [[64] * 14 + [0, 0], [12] * 14 + [0, 0]])
    tiles = build_tiles([(0, 0, 30), (1, 30, 1), (1, 31, 40)], scene.tables)
    kernels, threads, results = CpuKernels(), torch.get_num_threads(), []
    inputs = {width: torch.randn(71, width).to(dtype) for width in (256, 512, 1024)}
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        step, outs = kernels.prepare_lora(tiles, scene.tables), []
        for site in shape.sites[:-2]:
            outs.append(torch.zeros(71, sum(site.widths), dtype=dtype))
            shrunk = kernels.shrink(inputs[site.in_width], scene.pages, site, step)
            kernels.expand(outs[-1], shrunk, scene.pages, site, step)
        results.append(torch.cat([out.flatten() for out in outs]))
    torch.set_num_threads(threads)
    assert results[0].isfinite().all() and results[0].any()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
