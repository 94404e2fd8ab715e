import math
from array import array
from dataclasses import replace

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_update,
    torch_recurrent_gated_delta_rule,
)

from slora_kernels.batch import Activation, AttentionBatch, AttentionRule, KVGeometry, LoraTiles
from slora_kernels.cpu import kernels as cpu_kernels
from slora_kernels.cpu import token_recurrence
from slora_kernels.cpu.kernels import CpuKernels
from slora_kernels.cpu.machine_code import find_worker, has_workers
from slora_kernels.cpu.thread_team import ThreadTeam
from slora_kernels.cpu.worker_sizes import ACTIVATIONS
from slora_kernels.layout import llama_shape
from slora_kernels.torch import reference
from tests.kernels.scenes import build_adapters, build_attention, build_tiles, check_close

pytestmark = pytest.mark.skipif(not has_workers(), reason="there is neither machine code nor numba")


def test_without_openmp_python_threads_give_the_same_bits() -> None:
    x, weight = torch.randn(300, 512), torch.randn(512)
    plain, fallback = CpuKernels(), CpuKernels(ThreadTeam(allow_openmp=False))
    assert torch.equal(plain.rms_norm(x, weight, 1e-5), fallback.rms_norm(x, weight, 1e-5))


def test_a_row_of_a_wider_tensor_is_normalized() -> None:
    """Born from a review: torch takes a single row for contiguous, whatever its stride is. The kernel took the stride
    for the width of the result, and wrote behind its end.
    """
    wide, weight = torch.randn(1, 160), torch.randn(130)
    x, residual = wide[:, :130], wide.clone()[:, :130]
    check_close(CpuKernels().rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), units=1)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    check_close(CpuKernels().add_rms_norm(x, residual, weight, 1e-5), expected, units=2)
    check_close(residual, expected_residual, units=1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_largest_negative_gates_give_what_torch_gives(activation: Activation) -> None:
    """Born from a review: the sigmoid of such a gate was 2^-126, so its product was -3.5 instead of 0."""
    gate_up = torch.tensor([[-3.3e38, -1e38, -1e30, -torch.inf, -torch.nan, *[1.0] * 5]])
    expected = reference.act_mul(gate_up, activation)
    torch.testing.assert_close(CpuKernels().act_mul(gate_up, activation), expected, equal_nan=True)


@pytest.mark.parametrize("allow_openmp", (True, False))
def test_collected_jobs_run_in_order_at_the_end_unless_there_is_an_error(allow_openmp: bool) -> None:
    kernels, weight = CpuKernels(ThreadTeam(allow_openmp=allow_openmp)), torch.randn(512)
    x, residual = torch.randn(300, 512), torch.randn(300, 512)

    def compute(sums: torch.Tensor) -> torch.Tensor:
        hidden = kernels.add_rms_norm(x, sums, weight, 1e-5)
        for _ in range(4):  # The function drops what later jobs read.
            hidden = kernels.act_mul(hidden, "silu")
        return hidden

    expected_sums = residual.clone()
    expected, sums, dropped = compute(expected_sums), residual.clone(), residual.clone()
    with kernels.collecting_jobs() as run_again:
        result = compute(sums)
    with pytest.raises(ZeroDivisionError), kernels.collecting_jobs():
        compute(dropped)
        _ = 1 / 0
    assert torch.equal(result, expected) and torch.equal(sums, expected_sums)
    assert torch.equal(dropped, residual)
    assert torch.equal(compute(dropped), expected)
    # `dropped` is the sum now. The jobs run again with other rows.
    x.mul_(-2.0)
    expected, expected_sums = compute(dropped), dropped
    run_again()
    assert torch.equal(result, expected) and torch.equal(sums, expected_sums)


def test_threads_that_torch_gets_during_a_step_have_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Born from a review: they wrote behind the scratch memory, which had been reserved for fewer threads."""
    used = list[int]()

    class Team(ThreadTeam):
        def run(self, worker: int, job: "array[int]", threads: int, *operands: object) -> None:
            used.append(threads)
            super().run(worker, job, threads, *operands)

    monkeypatch.setattr(cpu_kernels, "SERIAL_ELEMENTS", 0)
    kernels, geometry = CpuKernels(Team()), KVGeometry(2, 6, 2, 32, 16, torch.float32)
    scene = build_attention(geometry, [(1, 200), (5, 70), (1, 130)])
    shape = llama_shape(2, 64, 6, 2, 16, 96, 300, 4)
    adapters = build_adapters(shape, torch.float32, [[8] * 16, [40] * 16])
    tiles, site = build_tiles([(0, 0, 3), (1, 3, 4)], adapters.tables), shape.sites[0]
    x, results, before = torch.randn(7, 64), list[torch.Tensor](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step, lora_step = kernels.prepare_attention(scene.batch), kernels.prepare_lora(tiles, adapters.tables)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = torch.zeros(7, sum(site.widths))
            shrunk = kernels.shrink(x, adapters.pages, site, lora_step)
            kernels.expand(out, shrunk, adapters.pages, site, lora_step)
            results += kernels.attend(scene.q, scene.pages, geometry, 1, step, AttentionRule(0.1)), out
    finally:
        torch.set_num_threads(before)
    assert used == [1] * 4
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_kept_jobs_compute_attention_and_lora_of_another_step() -> None:
    """The rows of the other step have other contexts, pages and adapters, so their tiles have another order."""
    kernels, geometry, rule = CpuKernels(), KVGeometry(2, 6, 2, 32, 16, torch.bfloat16), AttentionRule(0.1)
    scene = build_attention(geometry, [(1, 200), (1, 3), (1, 70), (1, 130)])
    shape = llama_shape(2, 64, 6, 2, 16, 96, 300, 2)
    adapters = build_adapters(shape, torch.bfloat16, [[8] * 16, [40] * 16, [16] * 16])
    tiles = build_tiles([(0, 0, 1), (1, 1, 1), (2, 2, 1), (1, 3, 1)], adapters.tables)
    site = shape.sites[0]
    x = torch.randn(4, site.in_width).to(torch.bfloat16)

    def compute(batch: AttentionBatch, q: torch.Tensor, lora: LoraTiles) -> tuple[torch.Tensor, ...]:
        step, lora_step = kernels.prepare_attention(batch), kernels.prepare_lora(lora, adapters.tables)
        attended = kernels.attend(q, scene.pages, geometry, 1, step, rule)
        for _ in range(2):
            shrunk = kernels.shrink(x, adapters.pages, site, lora_step)
            kernels.expand(out, shrunk, adapters.pages, site, lora_step)
        return attended, out

    order = [2, 3, 0, 1]
    batch = scene.batch
    other = replace(
        batch,
        context_lens=batch.context_lens[order],
        block_tables=batch.block_tables[order],
        positions=batch.positions[order],
        kv_slots=batch.kv_slots[order],
    )
    other_tiles = build_tiles([(1, 0, 1), (2, 1, 1), (1, 2, 1), (0, 3, 1)], adapters.tables)
    out = torch.zeros(4, sum(site.widths), dtype=torch.bfloat16)
    expected = [result.clone() for result in compute(other, scene.q, other_tiles)]
    out = torch.zeros_like(out)
    with kernels.collecting_jobs() as run_again:
        attended, _ = compute(batch, scene.q, tiles)
    assert not torch.equal(attended, expected[0])
    for name in ("context_lens", "block_tables", "positions", "kv_slots"):
        getattr(batch, name).copy_(getattr(other, name))
    tiles.tiles.copy_(other_tiles.tiles)
    tiles.weights.copy_(other_tiles.weights)
    out.zero_()
    run_again()
    assert torch.equal(attended, expected[0]) and torch.equal(out, expected[1])


def test_a_kept_lora_job_waits_for_the_shrink_of_its_own_run() -> None:
    """Born from a review: a thread that does not wait adds what an earlier run has left of the other thread's rows."""
    kernels, shape = CpuKernels(), llama_shape(1, 1 << 17, 6, 2, 16, 96, 300, 2)
    # One thread shrinks, and the other one has nothing to do but to expand.
    adapters = build_adapters(shape, torch.bfloat16, [[16, *[0] * (shape.num_modules - 1)]])
    tiles, site, before = build_tiles([(0, 0, 1)], adapters.tables), shape.sites[0], torch.get_num_threads()
    x, out = (
        torch.randn(1, site.in_width).to(torch.bfloat16),
        torch.zeros(1, sum(site.widths)).to(torch.bfloat16),
    )

    def compute(sums: torch.Tensor) -> None:
        step = kernels.prepare_lora(tiles, adapters.tables)
        shrunk = kernels.shrink(x, adapters.pages, site, step)
        kernels.expand(sums, shrunk, adapters.pages, site, step)

    torch.set_num_threads(2)
    try:
        with kernels.collecting_jobs() as run_again:
            compute(out)
        for _ in range(150):
            x.copy_(torch.randn(x.shape))
            expected = torch.zeros_like(out)
            compute(expected)
            out.zero_()
            run_again()
            assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(before)


def test_many_rows_that_the_threads_share_are_each_computed_once() -> None:
    kernels, before = CpuKernels(), torch.get_num_threads()
    rows, residual, weight = torch.randn(401, 256), torch.randn(401, 256), torch.randn(256)
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            sums = residual.clone()
            # The second run also shows that all shares begin again.
            with kernels.collecting_jobs() as run_again:
                out = kernels.add_rms_norm(rows, sums, weight, 1e-5)
            run_again()
            results.append((sums, out))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], residual + rows + rows)
    for sums, out in results[1:]:
        assert torch.equal(sums, results[0][0]) and torch.equal(out, results[0][1])


def test_torchs_own_threads_are_found() -> None:
    assert ThreadTeam().openmp


def test_any_number_of_threads_gives_the_same_bits() -> None:
    geometry = KVGeometry(2, 6, 2, 32, 16, torch.bfloat16)
    scene = build_attention(geometry, [(1, 200), (40, 40), (1, 3), (9, 100)])
    kernels, threads = CpuKernels(), torch.get_num_threads()
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        step = kernels.prepare_attention(scene.batch)
        results.append(kernels.attend(scene.q, scene.pages, geometry, 1, step, AttentionRule(0.1)))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_row_with_a_nan_stays_a_nan(dtype: torch.dtype) -> None:
    kernels = CpuKernels()
    x = torch.randn(3, 64).to(dtype)
    x[1, 5] = torch.nan
    norm = kernels.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5)
    assert norm[1].isnan().all() and not norm[[0, 2]].isnan().any()
    for activation in ACTIVATIONS:
        expected = reference.act_mul(x, activation)
        assert torch.equal(kernels.act_mul(x, activation).isnan(), expected.isnan())


def test_bfloat16_results_are_rounded_to_nearest_even() -> None:
    # 1 + 1/256 lies halfway between 1 and the next bfloat16, 1 + 1/128. 1 + 3/256 lies halfway between that and 1 +
    # 1/64.
    x = torch.tensor([[1.0] * 8, [1.0078125] * 8], dtype=torch.bfloat16)
    residual = torch.full((2, 8), 2**-8, dtype=torch.bfloat16)
    kernels = CpuKernels()
    kernels.add_rms_norm(x, residual, torch.ones(8, dtype=torch.bfloat16), 1e-5)
    assert residual[0].eq(1.0).all() and residual[1].eq(1.015625).all()


def test_warming_up_compiles_every_worker_once() -> None:
    kernels = CpuKernels()
    geometry = KVGeometry(1, 1, 1, 16, 16, torch.float32)
    kernels.warm_up(geometry)
    compiled = find_worker.cache_info().misses
    kernels.warm_up(geometry)
    kernels.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
    assert find_worker.cache_info().misses == compiled


@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak))
)
@pytest.mark.parametrize("heads", (2, 4))
def test_one_token_of_a_recurrence_matches_transformers(dtype: torch.dtype, heads: int) -> None:
    """Also in states that are parts of longer rows, as in pages."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    def make_states(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(3, 5 + math.prod(shape)).to(dtype)
        return row[:, 2:-3].view(3, *shape), row[:, 2:-3].reshape(3, *shape).clone()

    query, key, value = draw(3, 2, 24), draw(3, 2, 24), draw(3, heads, 10)
    gate, beta = -torch.rand(3, heads), torch.rand(3, heads).to(dtype)
    for norms in (False, True):
        state, before = make_states(heads, 24, 10)
        out = token_recurrence.apply_delta_rule(query, key, value, gate.exp(), beta, state, norms=norms)
        expected, after = torch_recurrent_gated_delta_rule(
            *(part[:, None] for part in (query, key, value)),
            g=gate[:, None],
            beta=beta[:, None],
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=norms,
        )
        check_close(out, expected[:, 0], units=2)
        check_close(state, after, units=100)
    step, decay, skip = torch.rand(3, heads), torch.rand(heads), torch.rand(heads)
    state, before = make_states(heads, 10, 24)
    out = token_recurrence.scan(value, key, query, step, (step * -decay).exp(), skip, state)
    # In half precision, transformers rounds the two terms of the result before it adds them.
    expected = mamba2_selective_state_update(
        before,
        value.float(),
        step[..., None].expand(-1, -1, 10),
        -decay[:, None, None].expand(-1, 10, 24),
        key.float(),
        query.float(),
        skip[:, None].expand(-1, 10),
        dt_softplus=False,
    )
    check_close(out, expected, units=2)
    check_close(state, before, units=100)
    for kept, activates in ((3, True), (4, False)):
        x, weight, bias = draw(3, 21), draw(21, 4), draw(21)
        window, before = make_states(21, kept, dtype=dtype)
        out = token_recurrence.convolve(x, window, weight, bias, activates=activates)
        expected = causal_conv1d_update(x[..., None], before, weight, bias, "silu" if activates else None)
        check_close(out, expected[..., 0], units=4)
        assert torch.equal(window, before)
