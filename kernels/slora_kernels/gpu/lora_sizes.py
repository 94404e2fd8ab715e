"""Launch sizes of the LoRA kernels by GPU, width and rank, read from a table in the package.

The splits of shrink and `RowSizes` decide in which order the products of a token are added. Both depend only on the
width, which is a property of the model. A token therefore gets the same bits in every batch. All other sizes affect
only speed, and may also depend on the greatest rank of the step.

`bench/gpu/tune.py` measures and writes the table. Nothing is tuned while serving. This module imports no kernel.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

SIZES_FILE = Path(__file__).with_name("lora_sizes.json")
_DEFAULT = "default"

# Values that the table may contain. `tl.dot` needs at least 16 columns, so tile ranks begin at 16.
_SPLITS = range(1, 65)
_TILE_RANKS = (16, 32, 64, 128)
_ROW_RANKS = (1, 2, 4, 8, 16, 32, 64)
_BLOCK_SEGMENTS = (1, 2, 4, 8)
_WARPS = (1, 2, 4, 8)
_STAGES = range(1, 9)


@dataclass(frozen=True, slots=True)
class ShrinkTile:
    """Sizes of a shrink program, for ranks up to max_rank.

    max_rank: greatest rank of a site, which is the sum of its modules' ranks. None: no limit.
    block_rank: rows of A per program. block_segments: segments of each row per iteration of the loop.
    """

    max_rank: int | None
    block_rank: int
    block_segments: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ShrinkSizes:
    """Sizes of the shrink kernel, for input widths up to max_width.

    max_width: None means no limit. splits: the maximum number of shares that the width is split into, for decode rows.
    tiles: sizes for steps of decode rows. mixed_tiles: sizes for steps with prefill chunks.
    """

    max_width: int | None
    splits: int
    tiles: tuple[ShrinkTile, ...]
    mixed_tiles: tuple[ShrinkTile, ...]

    def tile(self, rank: int, *, has_chunks: bool) -> ShrinkTile:
        tiles = self.mixed_tiles if has_chunks else self.tiles
        return next(tile for tile in tiles if tile.max_rank is None or rank <= tile.max_rank)


@dataclass(frozen=True, slots=True)
class ExpandTile:
    """Sizes of an expand program, for ranks up to max_rank.

    max_rank: as in `ShrinkTile`. block_segments: segments of output columns per program.
    """

    max_rank: int | None
    block_segments: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Sizes of an expand program for decode rows.

    block_rank: rows of B per iteration. block_segments: segments of output columns per program.
    """

    block_rank: int
    block_segments: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ExpandSizes:
    """Sizes of the expand kernels, for sites whose modules have up to max_width output columns in total.

    max_width: None means no limit. rows: sizes for decode rows. tiles: sizes for all other tokens.
    """

    max_width: int | None
    rows: RowSizes
    tiles: tuple[ExpandTile, ...]

    def tile(self, rank: int) -> ExpandTile:
        return next(tile for tile in self.tiles if tile.max_rank is None or rank <= tile.max_rank)


@dataclass(frozen=True, slots=True)
class LoraSizes:
    """The sizes for one GPU. `shrink` and `expand` are in ascending order of max_width; the last entry has no limit."""

    shrink: tuple[ShrinkSizes, ...]
    expand: tuple[ExpandSizes, ...]

    def select_shrink(self, width: int) -> ShrinkSizes:
        return next(sizes for sizes in self.shrink if sizes.max_width is None or width <= sizes.max_width)

    def select_expand(self, width: int) -> ExpandSizes:
        return next(sizes for sizes in self.expand if sizes.max_width is None or width <= sizes.max_width)


def name_architecture(device: torch.device) -> str:
    """The device's name in the table, such as sm_90 or gfx942. The name is "default" if the device is not a GPU."""
    if device.type != "cuda":
        return _DEFAULT
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def load_sizes(architecture: str = _DEFAULT) -> LoraSizes:
    """The sizes of an architecture in the package's table, or the default sizes if the table does not contain it."""
    tables = _load()
    return tables.get(architecture, tables[_DEFAULT])


@cache
def _load() -> dict[str, LoraSizes]:
    return read_sizes(SIZES_FILE)


def read_sizes(path: Path) -> dict[str, LoraSizes]:
    """Reads all architectures of a table.

    Raises ValueError with the path of the wrong value in the JSON, and the allowed values.
    """
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path.name} is not JSON ({error}); write the table with bench/gpu/tune.py"
        ) from error
    if not isinstance(tables, dict) or _DEFAULT not in tables:
        raise ValueError(
            f"{path.name} has no entry {_DEFAULT!r}; add the sizes for GPUs that the table does not name"
        )
    return {name: _read_sizes(_JsonFields(f"{path.name}: {name}", fields)) for name, fields in tables.items()}


class _JsonFields:
    """An object in the table's JSON, with its path. Its methods raise ValueError for a missing or invalid value."""

    def __init__(self, path: str, fields: object) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"{path} is {fields!r}; it must be an object")
        self._path = path
        self._fields = fields

    def get(self, name: str) -> Any:
        if name not in self._fields:
            raise ValueError(f"{self._path} has only the fields {sorted(self._fields)}; add {name!r}")
        return self._fields[name]

    def inner(self, name: str) -> "_JsonFields":
        return _JsonFields(f"{self._path}.{name}", self.get(name))

    def one_of(self, name: str, allowed: Sequence[Any]) -> Any:
        value = self.get(name)
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise ValueError(
                f"{self._path}.{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}"
            )
        return value

    def ascending(self, name: str, bound: str) -> list["_JsonFields"]:
        """Returns a list of objects whose `bound` fields are ascending integers, with null in the last object."""
        entries = self.get(name)
        path = f"{self._path}.{name}"
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"{path} is {entries!r}; it must be a list of at least one object")
        places = [_JsonFields(f"{path}[{index}]", entry) for index, entry in enumerate(entries)]
        bounds = [place.get(bound) for place in places]
        whole = [value for value in bounds[:-1] if type(value) is int]
        if bounds[-1] is not None or len(whole) < len(bounds) - 1 or whole != sorted({*whole}):
            raise ValueError(
                f"{path}: the values of {bound} are {bounds}; they must be ascending integers, with null at the end"
            )
        return places


def _read_sizes(place: _JsonFields) -> LoraSizes:
    shrink = [_read_shrink(entry) for entry in place.ascending("shrink", "max_width")]
    return LoraSizes(
        tuple(shrink), tuple(_read_expand(entry) for entry in place.ascending("expand", "max_width"))
    )


def _read_shrink(place: _JsonFields) -> ShrinkSizes:
    tiles, mixed_tiles = (
        tuple(_read_shrink_tile(tile) for tile in place.ascending(name, "max_rank"))
        for name in ("tiles", "mixed_tiles")
    )
    return ShrinkSizes(place.get("max_width"), place.one_of("splits", _SPLITS), tiles, mixed_tiles)


def _read_shrink_tile(tile: _JsonFields) -> ShrinkTile:
    return ShrinkTile(
        tile.get("max_rank"),
        tile.one_of("block_rank", _TILE_RANKS),
        tile.one_of("block_segments", _BLOCK_SEGMENTS),
        tile.one_of("num_warps", _WARPS),
        tile.one_of("num_stages", _STAGES),
    )


def _read_expand(place: _JsonFields) -> ExpandSizes:
    rows = place.inner("rows")
    tiles = [
        ExpandTile(
            tile.get("max_rank"),
            tile.one_of("block_segments", _BLOCK_SEGMENTS),
            tile.one_of("num_warps", _WARPS),
            tile.one_of("num_stages", _STAGES),
        )
        for tile in place.ascending("tiles", "max_rank")
    ]
    return ExpandSizes(
        place.get("max_width"),
        RowSizes(
            rows.one_of("block_rank", _ROW_RANKS),
            rows.one_of("block_segments", _BLOCK_SEGMENTS),
            rows.one_of("num_warps", _WARPS),
        ),
        tuple(tiles),
    )
