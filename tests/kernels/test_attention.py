import pytest
import torch

from slora_kernels import reference
from slora_kernels.batch import AttentionBatch, KVGeometry
from slora_kernels.ops import Kernels
from tests.kernels.scenes import AttentionScene, build_attention, check_close

# (query heads, KV heads, head dim, block tokens)
HEADS = ((2, 2, 64, 16), (6, 2, 16, 8), (4, 1, 128, 16), (3, 1, 80, 16))
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 129), (1, 300)]
CHUNKS = [(5, 5), (16, 16), (17, 40), (2, 130), (37, 64)]
MIXED = [(1, 33), (23, 23), (1, 1), (1, 200), (7, 150)]


def build(
    heads: tuple[int, int, int, int], dtype: torch.dtype, chunks: list[tuple[int, int]], device: str
) -> AttentionScene:
    num_heads, num_kv_heads, head_dim, block_tokens = heads
    return build_attention(
        KVGeometry(2, num_heads, num_kv_heads, head_dim, block_tokens, dtype), chunks, device=device
    )


def attend(kernels: Kernels, scene: AttentionScene) -> torch.Tensor:
    step = kernels.prepare_attention(scene.batch)
    scale = scene.geometry.head_dim**-0.5
    return kernels.attend(scene.q, scene.pages, scene.geometry, scene.layer, step, scale)


@pytest.mark.parametrize("chunks", (DECODES, CHUNKS, MIXED), ids=("decode", "prefill", "mixed"))
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [*((torch.float32, heads) for heads in HEADS), (torch.bfloat16, HEADS[1]), (torch.bfloat16, HEADS[3])],
    ids=str,
)
def test_attention_over_scattered_pages_matches_its_twin(
    kernels: Kernels,
    device: str,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    chunks: list[tuple[int, int]],
) -> None:
    scene = build(heads, dtype, chunks, device)
    scale = scene.geometry.head_dim**-0.5
    expected = reference.attend(scene.q, scene.pages, scene.geometry, 1, scene.batch, scale)
    check_close(attend(kernels, scene), expected, units=1)


def test_attention_works_in_half_precision(kernels: Kernels, device: str) -> None:
    scene = build(HEADS[0], torch.float16, MIXED, device)
    expected = reference.attend(scene.q, scene.pages, scene.geometry, 1, scene.batch, 0.1)
    step = kernels.prepare_attention(scene.batch)
    actual = kernels.attend(scene.q, scene.pages, scene.geometry, 1, step, 0.1)
    check_close(actual, expected, units=1)


def take_alone(scene: AttentionScene, b: int) -> AttentionScene:
    """The same sequence in a batch of its own."""
    batch = scene.batch
    first, last = batch.query_starts[b : b + 2].tolist()
    context = int(batch.context_lens[b])
    alone = AttentionBatch(
        batch.query_starts[b : b + 2] - first,
        batch.context_lens[b : b + 1],
        batch.block_tables[b : b + 1],
        batch.positions[first:last],
        batch.kv_slots[first:last],
        last - first,
        context,
    )
    return AttentionScene(scene.geometry, scene.pages, alone, scene.q[first:last])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    scene = build(HEADS[1], dtype, MIXED, device)
    together = attend(kernels, scene)
    for b in range(len(MIXED)):
        first, last = scene.batch.query_starts[b : b + 2].tolist()
        alone = attend(kernels, take_alone(scene, b))
        assert torch.equal(together[first:last], alone)
