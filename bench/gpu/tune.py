"""Which sizes the LoRA kernels are fastest with on this GPU: measures candidates, and writes the table that ships.

    python -m bench.gpu.tune ROWS [--seconds 480] [--table FILE]
    python -m bench.gpu.tune --compile sm_90    # measures nothing: what candidates need of a GPU that is not here

ROWS gets a line for each case as it is measured; run again, it goes on behind the last one. When all are there, the
choice for this GPU is put into the table, by default the package's. A candidate is compared with the torch twin before
it is timed. What may decide the order of somebody's sums is chosen by the width alone, the rest by width and rank: see
`slora_kernels.gpu.lora_sizes`. Each step counts the same: by the time over that of the best candidate in it.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.device_time import time_device
from bench.gpu.random_adapters import BLOCK_TOKENS, RandomAdapters, cut_evenly
from bench.gpu.resumed_table import ResumedTable
from bench.table import Row
from slora_kernels.gpu.ahead_of_time import TARGETS, set_compile_target
from slora_kernels.gpu.compiled_kernel import CompiledKernel, read_compiled
from slora_kernels.gpu.lora_expand_rows import ROW_TILE_TOKENS
from slora_kernels.gpu.lora_shrink import TILE_TOKENS
from slora_kernels.gpu.lora_sizes import (
    SIZES_FILE,
    ExpandSizes,
    ExpandTile,
    LoraSizes,
    RowSizes,
    ShrinkSizes,
    ShrinkTile,
    load_sizes,
    name_architecture,
    read_sizes,
)
from slora_kernels.gpu.model_launches import bind_lora_site
from slora_kernels.gpu.triton_kernels import TritonKernels
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import LoraSite, ModelShape, llama_shape
from slora_kernels.ops import Kernels

_DEFAULT = load_sizes()
# A site's greatest total rank over that of one module, when all linears are adapted: q, k and v.
_STACKED = 3


@dataclass(frozen=True, slots=True)
class TunedStep:
    """`batch` sequences of as many `adapters` that each compute `tokens`."""

    batch: int
    adapters: int
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Scope:
    """What is gone through: linears of which models, ranks (ascending), steps, candidates."""

    shapes: tuple[ModelShape, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...]
    steps: tuple[TunedStep, ...]
    shrinks: tuple[ShrinkSizes, ...]
    expands: tuple[ExpandSizes, ...]


def shrink_candidates(
    splits: Iterable[int],
    ranks: Iterable[int],
    segments: Iterable[int],
    warps: Iterable[int],
    stages: Iterable[int],
) -> tuple[ShrinkSizes, ...]:
    tiles = [ShrinkTile(None, *sizes) for sizes in product(ranks, segments, warps, stages)]
    return tuple(ShrinkSizes(None, count, (tile,), (tile,)) for count in splits for tile in tiles)


def expand_candidates(
    tiles: Iterable[tuple[int, int]], rows: Iterable[tuple[int, int, int]]
) -> tuple[ExpandSizes, ...]:
    """tiles: pairs of segments of output columns and warps. rows: the same, after a block of ranks."""
    plain = _DEFAULT.expand[-1]
    of_tiles = [ExpandSizes(None, plain.rows, (ExpandTile(None, *tile, 2),)) for tile in tiles]
    of_rows = [ExpandSizes(None, RowSizes(*row), plain.tiles) for row in rows]
    return (*of_tiles, *of_rows)


# Llama-3.1-8B and 70B: two layers, so that what one has read is not what the next one reads.
REAL = Scope(
    shapes=(
        llama_shape(2, 4096, 32, 8, 128, 14336, 128256, 2),
        llama_shape(2, 8192, 64, 8, 128, 28672, 128256, 2),
    ),
    dtype=torch.bfloat16,
    ranks=(8, 16, 64),
    steps=(TunedStep(1, 1), TunedStep(64, 8), TunedStep(64, 64), TunedStep(4, 4, 512)),
    shrinks=shrink_candidates((8, 16), (16, 32), (1, 2), (2, 4), (2, 3, 4)),
    # Larger ones need more registers than sm_90 has: 4 segments with 4 warps, and a rank of 32 with several segments.
    expands=expand_candidates(
        ((2, 4), (4, 8)),
        ((8, 1, 1), (8, 2, 1), (8, 4, 2), (16, 1, 1), (16, 2, 1), (16, 4, 2), (16, 8, 4), (32, 1, 1)),
    ),
)


class Tuning:
    def __init__(self, scope: Scope, device: torch.device) -> None:
        self._scope = scope
        self._device = device
        self._twin = select_kernels("torch", device)

    def cases(self) -> Iterator[tuple[Row, Callable[[], Row]]]:
        """Each candidate at each linear, rank and step; a shrink's expand is the default, and the other way round."""
        scope = self._scope
        for kernel, candidates in (("shrink", scope.shrinks), ("expand", scope.expands)):
            for index, site in _distinct(scope.shapes, kernel):
                width = _width(site, kernel)
                for rank, step, candidate in product(scope.ranks, scope.steps, candidates):
                    if isinstance(candidate, ExpandSizes) and not _takes(step, candidate):
                        continue
                    key = {"kernel": kernel, "width": width, "rank": rank, **asdict(step)}
                    key["candidate"] = json.dumps(asdict(candidate))
                    yield (
                        key,
                        lambda i=index, s=site, r=rank, t=step, c=candidate: self._measure(i, s, r, t, c),
                    )

    def _measure(
        self, index: int, site: LoraSite, rank: int, step: TunedStep, candidate: ShrinkSizes | ExpandSizes
    ) -> Row:
        is_shrink = isinstance(candidate, ShrinkSizes)
        shape, device, dtype = self._scope.shapes[index], self._device, self._scope.dtype
        scene = RandomAdapters.make(shape, dtype, (rank,), step.adapters, device)
        kernels = TritonKernels(sizes=_only(candidate))
        tiles = cut_evenly(
            step.batch * step.tokens,
            step.adapters,
            kernels.tile_limits,
            scene.max_group_rank,
            device,
            only_decodes=step.tokens == 1,
        )
        x = torch.randn(step.batch * step.tokens, site.in_width, device=device).to(dtype)
        out = torch.randn(len(x), sum(site.widths), device=device).to(dtype)

        def add(kernels: Kernels) -> Tensor:
            result, lora = out.clone(), kernels.prepare_lora(tiles, scene.tables)
            kernels.expand(result, kernels.shrink(x, scene.pages, site, lora), scene.pages, site, lora)
            return result

        unit = max(1e-5, 4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(add(kernels), add(self._twin), rtol=unit, atol=unit)
        lora = kernels.prepare_lora(tiles, scene.tables)
        sites = [_same_site(shape, site, layer) for layer in range(shape.num_layers)]
        shrink_outputs = [kernels.shrink(x, scene.pages, one, lora) for one in sites]

        def run() -> None:
            for one, shrunk in zip(sites, shrink_outputs, strict=True):
                if is_shrink:
                    kernels.shrink(x, scene.pages, one, lora)
                else:
                    kernels.expand(out, shrunk, scene.pages, one, lora)

        return {"us": time_device(run, device) / len(sites) * 1e6}


def _takes(step: TunedStep, candidate: ExpandSizes) -> bool:
    """Whether the step uses the sizes in which the candidate differs from the default.

    Decode steps use only `rows`, and steps of chunks only `tiles`.
    """
    plain = _DEFAULT.expand[-1]
    return candidate.tiles == plain.tiles if step.tokens == 1 else candidate.rows == plain.rows


def _only(candidate: ShrinkSizes | ExpandSizes) -> LoraSizes:
    """It beside the default of the other kernel."""
    if isinstance(candidate, ShrinkSizes):
        return LoraSizes((candidate,), _DEFAULT.expand)
    return LoraSizes(_DEFAULT.shrink, (candidate,))


def _width(site: LoraSite, kernel: str) -> int:
    return site.in_width if kernel == "shrink" else sum(site.widths)


def _distinct(shapes: tuple[ModelShape, ...], kernel: str) -> Iterator[tuple[int, LoraSite]]:
    """(shape, site of its first layer): one for each width, the one with most modules."""
    found: dict[int, tuple[int, LoraSite]] = {}
    for index, shape in enumerate(shapes):
        for site in shape.layer_sites(0):
            known = found.get(_width(site, kernel))
            if known is None or len(site.widths) > len(known[1].widths):
                found[_width(site, kernel)] = index, site
    yield from (found[width] for width in sorted(found))


def _same_site(shape: ModelShape, site: LoraSite, layer: int) -> LoraSite:
    return shape.layer_sites(layer)[shape.layer_sites(0).index(site)]


def choose(rows: list[Row]) -> dict[str, Any]:
    """The entry of the table, from all rows of one GPU."""
    chosen: dict[str, Any] = {"shrink": [], "expand": []}
    for kernel, pick in (("shrink", _pick_shrink), ("expand", _pick_expand)):
        widths = sorted({row["width"] for row in rows if row["kernel"] == kernel})
        for width in widths:
            mine = [row for row in rows if row["kernel"] == kernel and row["width"] == width]
            bound = width if width < widths[-1] else None
            chosen[kernel].append({"max_width": bound} | pick(_score(mine)))
    return chosen


def _score(rows: list[Row]) -> list[Row]:
    """Each row with its candidate's fields, and its time over the best one's of the same rank and step."""
    best: dict[tuple[Any, ...], float] = {}

    def place(row: Row) -> tuple[Any, ...]:
        return row["rank"], row["batch"], row["adapters"], row["tokens"]

    for row in rows:
        best[place(row)] = min(row["us"], best.get(place(row), row["us"]))
    return [row | json.loads(row["candidate"]) | {"score": row["us"] / best[place(row)]} for row in rows]


def _least(rows: list[Row], by: Callable[[Row], str]) -> tuple[str, float]:
    """The group of rows whose scores are the least on average, and that average."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row["score"])
    means = {name: sum(scores) / len(scores) for name, scores in groups.items()}
    name = min(means, key=lambda name: means[name])
    return name, means[name]


def _tiles(rows: list[Row]) -> tuple[list[dict[str, Any]], float]:
    """The best tile of each rank, and how good they are together."""
    ranks = sorted({row["rank"] for row in rows})
    tiles, total = [], 0.0
    for rank in ranks:
        name, mean = _least(
            [row for row in rows if row["rank"] == rank], lambda row: json.dumps(row["tiles"][0])
        )
        bound = _STACKED * rank if rank < ranks[-1] else None
        tiles.append(json.loads(name) | {"max_rank": bound})
        total += mean
    return tiles, total / len(ranks)


def _pick_shrink(rows: list[Row]) -> dict[str, Any]:
    """The splits with which the best tiles of all ranks are best for decode rows. Chunks are not split."""
    decodes = [row for row in rows if row["tokens"] == 1]
    found = {
        splits: _tiles([row for row in decodes if row["splits"] == splits])
        for splits in {row["splits"] for row in decodes}
    }
    splits = min(found, key=lambda splits: found[splits][1])
    mixed_tiles, _ = _tiles([row for row in rows if row["tokens"] > 1])
    return {"splits": splits, "tiles": found[splits][0], "mixed_tiles": mixed_tiles}


def _pick_expand(rows: list[Row]) -> dict[str, Any]:
    row_sizes, _ = _least([row for row in rows if row["tokens"] == 1], lambda row: json.dumps(row["rows"]))
    tiles, _ = _tiles([row for row in rows if row["tokens"] > 1])
    return {"rows": json.loads(row_sizes), "tiles": tiles}


def write_choice(path: Path, architecture: str, entry: dict[str, Any]) -> None:
    """In place of what the table had for this GPU. Raises ValueError, and writes nothing, if it would be no table."""
    table = json.loads(path.read_text(encoding="utf-8")) | {architecture: entry}
    draft = path.with_suffix(".new.json")
    draft.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    read_sizes(draft)
    draft.replace(path)


def compile_candidates(scope: Scope, target: str, every: int) -> Iterator[CompiledKernel]:
    """Every n-th candidate and the last at each width, for decode and chunks; what is the same machine code once."""
    pages = torch.zeros(
        2, max(shape.layer_page_bytes(BLOCK_TOKENS) for shape in scope.shapes), dtype=torch.uint8
    )
    known: set[str] = set()
    for kernel, candidates in (("shrink", scope.shrinks), ("expand", scope.expands)):
        for index, site in _distinct(scope.shapes, kernel):
            chosen = dict.fromkeys([*candidates[::every], candidates[-1]])
            for candidate, tokens in product(chosen, (ROW_TILE_TOKENS, TILE_TOKENS)):
                launches = bind_lora_site(
                    scope.shapes[index], pages, scope.dtype, site, scope.ranks[-1], tokens, _only(candidate)
                )
                for launch in launches:
                    compiled = launch.compile() if kernel in launch.kernel.__name__ else None
                    if compiled is not None and compiled.hash not in known:
                        known.add(compiled.hash)
                        case = f"{_width(site, kernel)} wide, {candidate}"
                        yield read_compiled(compiled, target, str(scope.dtype), case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "rows", type=Path, nargs="?", help="file for the rows, as JSON lines; new rows are appended"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="start no case after this time")
    parser.add_argument("--table", type=Path, default=SIZES_FILE)
    parser.add_argument(
        "--compile", choices=list(TARGETS), help="only compile, for a GPU that this machine does not have"
    )
    parser.add_argument("--every", type=int, default=1, help="measure only every n-th candidate and the last")
    options = parser.parse_args()
    if options.compile:
        set_compile_target(options.compile)
        for compiled in compile_candidates(REAL, options.compile, options.every):
            print(json.dumps(asdict(compiled)), flush=True)
        return
    if options.rows is None:
        parser.error("give the file for the rows")
    device = torch.device("cuda")
    rows = ResumedTable(options.rows, device)
    if not rows.fill(Tuning(REAL, device).cases(), options.seconds):
        print(f"{len(rows.rows())} cases are measured, but not all: run this again")
        return
    architecture = name_architecture(device)
    write_choice(options.table, architecture, choose(rows.rows()))
    print(f"{options.table} has sizes for {architecture}")


if __name__ == "__main__":
    main()
