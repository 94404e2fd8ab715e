"""The sizes that the workers and the code that makes their jobs agree on.

This module imports neither torch nor numba, because each is missing where the other one is needed: an installation has
the workers' machine code and no compiler, and the machine that compiles them needs no torch.
"""

from slora_kernels.cpu_isa import find_cpu_isa

# A job is an array of 64-bit words, see `workers.intrinsics`.
NEXT_WORKER, NUM_ITEMS, NUM_PREPARED, NUM_SHARES, NEXT_ITEM = range(5)
MAX_SHARES = 8
NUM_WORDS = NEXT_ITEM + MAX_SHARES
FIELD_WORDS = 3

_ISA = find_cpu_isa()
HAS_AVX2 = _ISA in ("avx2", "avx512", "avx512_bf16", "amx")
HAS_NEON = _ISA == "neon"
# float32 lanes per vector. CPUs with AVX-512 have 32 registers of 16 lanes, CPUs with AVX2 16 registers of 8. CPUs with
# NEON have 32 registers of 4, and a vector takes two.
LANES = 16 if _ISA in ("avx512", "avx512_bf16", "amx") else 8
# Whether one instruction adds two bfloat16 products to each float32 lane. The result is as exact as in float32.
HAS_BFLOAT16_DOT = _ISA in ("avx512_bf16", "amx")
# Whether there are tiles (AMX) whose products add 32 bfloat16 products to each float32.
HAS_TILES = _ISA == "amx"
# A tile has 16 rows of 32 terms. As a second factor it has 16 rows of pairs and 16 columns.
ROWS, TERMS, COLUMNS = 16, 32, 16

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

# Attention.
# The maximum number of rows of a tile: queries times heads of a group.
TILE_ROWS = 192
# The maximum number of keys in a block. With head dim 64 and 16 bits, the keys and the values of a block take 8 KiB
# each. They share the L2 cache with the scores.
BLOCK_KEYS = 64
# The window size of a model that has no sliding window: longer than any context.
NO_WINDOW = 1 << 40

# LoRA.
# Columns of B that are packed at a time, and the distance of the packed rows. See `workers.lora`.
PACKED_COLUMNS = 256
PACKED_PITCH = PACKED_COLUMNS + 2 * LANES
# The most tokens of a LoRA tile, whose data fit a core's own cache.
TILE_TOKENS = 128
# Rows and columns of sums in `workers.tile_lora` that are computed before they are added to the output. They take a
# third of the smallest cache, and as much memory as the sums of two tiles of ranks for all tokens.
SUM_ROWS, SUM_COLUMNS = 32, 128
NUM_SUMS = SUM_ROWS * SUM_COLUMNS
assert NUM_SUMS == TILE_TOKENS * 2 * ROWS
# Rows of an adapter's head that one item multiplies.
LOGIT_ROWS = 64
# Elements of the last segment of a row of A, if the row is no whole number of terms.
TAIL_COLUMNS = 128

# Products with weights.
PANEL_COLUMNS = 2 * COLUMNS
PANEL_ROWS = 2 * ROWS
# Rows that are multiplied with a panel at a time: those of two tiles, or those whose sums fit 24 of 32 registers.
BLOCK_ROWS = PANEL_ROWS if HAS_TILES else 12
# Rows that share a part of a panel, and the steps of the part, which take 16 KiB of the smallest cache.
GROUP_ROWS, CHUNK_STEPS = 256, 8
# Rows that are multiplied with codes and bytes in vectors, not in tiles.
FEW_ROWS = 2
# Numbers of bfloat16 whose sum stands for a number of a table of codes that has more bits.
SPLIT_PARTS = 2
# Steps of a panel of bytes that are widened at a time.
WIDENED_STEPS = 4
# Output columns of an item in `workers.quantized`. Their rows of the weight fit a core's own cache for any usual width.
ITEM_ROWS = 64
# The same for a weight of 4 bits, whose decoded rows have to fit as well.
CODED_ITEM_ROWS = 16
# `coded_weight.BLOCK_COLUMNS`.
CODE_COLUMNS = 32

# Copies of matrices.
# The fields of a job for each copy.
COPY_FIELDS = 5
# Bytes of a row of a block that is transposed. 32 registers of AVX-512 or NEON hold a block, those of AVX2 half of it.
TRANSPOSED_BYTES = 32


def count_float_scratch(head_dim: int) -> int:
    """Number of float32 scratch values that a thread needs for attention."""
    return TILE_ROWS * (head_dim + 3 + BLOCK_KEYS)


def count_starts() -> int:
    """Number of places (int64) that a thread needs for attention: those of a block's keys, and of its tiles."""
    return BLOCK_KEYS + 16


def count_operand_scratch(head_dim: int) -> int:
    """Number of `operand_dtype` scratch values that a thread needs for attention.

    It includes padding, because rows are read in whole vectors.
    """
    return TILE_ROWS * (head_dim + BLOCK_KEYS) + 2 * BLOCK_KEYS * head_dim + 2 * LANES


def pad_rank(rank: int) -> int:
    """The number of rows of LoRA weights for which there is scratch: all terms of a step, and all rows of a tile."""
    return max(1, -(-rank // TERMS)) * TERMS


def count_lora_scratch(rank: int) -> int:
    """The scratch of a thread of `workers.tile_lora` in float32: sums, starts, and elements of the model's dtype.

    rank: see `pad_rank`.
    """
    elements = rank * (PACKED_PITCH + PACKED_COLUMNS + TILE_TOKENS) + TILE_TOKENS * TAIL_COLUMNS
    return NUM_SUMS + 2 * rank + elements // 2
