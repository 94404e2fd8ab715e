"""The sizes that the LoRA kernels are launched with, by GPU, width and rank: a table that ships in the package.

What decides the order of somebody's sums (splits, the form of decode rows and its sizes) may depend on the width
alone, which is the model's: so a token gets the same bits whoever shares its step. What only decides how fast the same
sums are computed may depend on the greatest rank of the step, too.

`bench/gpu/tune.py` measures and writes the file; nothing is tuned while serving. Knows no kernel.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = [
    "SIZES_FILE",
    "ExpandSizes",
    "ExpandTile",
    "Form",
    "LoraSizes",
    "RowSizes",
    "ShrinkSizes",
    "ShrinkTile",
    "load_sizes",
    "name_architecture",
    "read_sizes",
]

SIZES_FILE = Path(__file__).with_name("lora_sizes.json")
_DEFAULT = "default"
# Of decode rows in expand. rows: without matrix units, one after the other. tiles: as tokens of chunks.
Form = Literal["rows", "tiles"]

# What may stand in the table. A product of tiles has 16 columns or more.
_SPLITS = range(1, 65)
_TILE_RANKS = (16, 32, 64, 128)
_ROW_RANKS = (1, 2, 4, 8, 16, 32, 64)
_WARPS = (1, 2, 4, 8)
_STAGES = range(1, 9)


@dataclass(frozen=True, slots=True)
class ShrinkTile:
    """Of a program, up to this greatest total rank of a site; None: any. block_rank: rows of A."""

    max_rank: int | None
    block_rank: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ShrinkSizes:
    """Up to this width of the input; None: any. splits: shares of the width, at most."""

    max_width: int | None
    splits: int
    tiles: tuple[ShrinkTile, ...]

    def tile(self, rank: int) -> ShrinkTile:
        return next(tile for tile in self.tiles if tile.max_rank is None or rank <= tile.max_rank)


@dataclass(frozen=True, slots=True)
class ExpandTile:
    """Of a program, up to this greatest total rank of a site; None: any."""

    max_rank: int | None
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Of a program of the row form. block_rank: rows of B at a time."""

    block_rank: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ExpandSizes:
    """Up to this width of all outputs together; None: any. decode: the form that decode rows take."""

    max_width: int | None
    decode: Form
    rows: RowSizes
    tiles: tuple[ExpandTile, ...]

    def tile(self, rank: int) -> ExpandTile:
        return next(tile for tile in self.tiles if tile.max_rank is None or rank <= tile.max_rank)


@dataclass(frozen=True, slots=True)
class LoraSizes:
    """Of one GPU. Each list goes by width, ascending, and ends without a bound."""

    shrink: tuple[ShrinkSizes, ...]
    expand: tuple[ExpandSizes, ...]

    def with_decode(self, form: Form) -> "LoraSizes":
        """The same, but decode rows take this form everywhere."""
        return replace(self, expand=tuple(replace(sizes, decode=form) for sizes in self.expand))

    @property
    def has_rows(self) -> bool:
        """Whether decode rows take a form of their own anywhere."""
        return any(sizes.decode == "rows" for sizes in self.expand)

    def of_shrink(self, width: int) -> ShrinkSizes:
        return next(sizes for sizes in self.shrink if sizes.max_width is None or width <= sizes.max_width)

    def of_expand(self, width: int) -> ExpandSizes:
        return next(sizes for sizes in self.expand if sizes.max_width is None or width <= sizes.max_width)


def name_architecture(device: torch.device) -> str:
    """As the table spells it: sm_90, gfx942; "default" for what is no GPU."""
    if device.type != "cuda":
        return _DEFAULT
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def load_sizes(architecture: str = _DEFAULT) -> LoraSizes:
    """From the package's table; an architecture that it does not have takes its default."""
    tables = _load()
    return tables.get(architecture, tables[_DEFAULT])


@cache
def _load() -> dict[str, LoraSizes]:
    return read_sizes(SIZES_FILE)


def read_sizes(path: Path) -> dict[str, LoraSizes]:
    """All architectures of a table. Raises ValueError that says where it is broken and what may stand there."""
    try:
        tables = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is no JSON ({error}); have bench/gpu/tune.py write it") from error
    if not isinstance(tables, dict) or _DEFAULT not in tables:
        raise ValueError(f"{path.name} has no {_DEFAULT!r}, the sizes of GPUs that it does not name; add it")
    return {name: _read_sizes(_Place(f"{path.name}: {name}", fields)) for name, fields in tables.items()}


class _Place:
    """An object of the table's JSON, and where it stands. What it is asked for raises ValueError if it is not so."""

    def __init__(self, path: str, fields: object) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"{path} is {fields!r}; it must be an object")
        self._path = path
        self._fields = fields

    def get(self, name: str) -> Any:
        if name not in self._fields:
            raise ValueError(f"{self._path} has {sorted(self._fields)}; it needs {name!r}")
        return self._fields[name]

    def inner(self, name: str) -> "_Place":
        return _Place(f"{self._path}.{name}", self.get(name))

    def one_of(self, name: str, allowed: Sequence[Any]) -> Any:
        value = self.get(name)
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise ValueError(
                f"{self._path}.{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}"
            )
        return value

    def ascending(self, name: str, bound: str) -> list["_Place"]:
        """Objects with whole numbers for `bound` that ascend, and null at the end."""
        entries = self.get(name)
        path = f"{self._path}.{name}"
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"{path} is {entries!r}; it must be a list of at least one object")
        places = [_Place(f"{path}[{index}]", entry) for index, entry in enumerate(entries)]
        bounds = [place.get(bound) for place in places]
        whole = [value for value in bounds[:-1] if type(value) is int]
        if bounds[-1] is not None or len(whole) < len(bounds) - 1 or whole != sorted({*whole}):
            raise ValueError(
                f"{path} have {bound} {bounds}; they must be numbers that ascend, and null at the end"
            )
        return places


def _read_sizes(place: _Place) -> LoraSizes:
    shrink = [_read_shrink(entry) for entry in place.ascending("shrink", "max_width")]
    return LoraSizes(
        tuple(shrink), tuple(_read_expand(entry) for entry in place.ascending("expand", "max_width"))
    )


def _read_shrink(place: _Place) -> ShrinkSizes:
    tiles = [
        ShrinkTile(
            tile.get("max_rank"),
            tile.one_of("block_rank", _TILE_RANKS),
            tile.one_of("num_warps", _WARPS),
            tile.one_of("num_stages", _STAGES),
        )
        for tile in place.ascending("tiles", "max_rank")
    ]
    return ShrinkSizes(place.get("max_width"), place.one_of("splits", _SPLITS), tuple(tiles))


def _read_expand(place: _Place) -> ExpandSizes:
    rows = place.inner("rows")
    tiles = [
        ExpandTile(tile.get("max_rank"), tile.one_of("num_warps", _WARPS), tile.one_of("num_stages", _STAGES))
        for tile in place.ascending("tiles", "max_rank")
    ]
    return ExpandSizes(
        place.get("max_width"),
        place.one_of("decode", ("rows", "tiles")),
        RowSizes(rows.one_of("block_rank", _ROW_RANKS), rows.one_of("num_warps", _WARPS)),
        tuple(tiles),
    )
