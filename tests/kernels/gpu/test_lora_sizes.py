"""The table of LoRA tile sizes: the shipped table can be launched, and errors in a table name the broken entry."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slora_kernels.gpu.lora_sizes import SIZES_FILE, load_sizes, name_architecture, read_sizes
from slora_kernels.kernel_selector import select_kernels
from tests.support.json_files import read_json, write_json

Break = Callable[[Any], object]


def test_an_architecture_that_is_not_in_the_table_takes_the_default() -> None:
    assert name_architecture(torch.device("cpu")) == "default"
    assert load_sizes("sm_999") == load_sizes()
    assert select_kernels("triton", torch.device("cpu")).tile_limits.tokens == 32


def test_sizes_are_looked_up_by_width_then_rank(tmp_path: Path) -> None:
    def tile(bound: int | None, rank: int) -> dict[str, Any]:
        return {"max_rank": bound, "block_rank": rank, "block_segments": 1, "num_warps": 4, "num_stages": 2}

    table = read_json(SIZES_FILE)
    narrow = {
        "max_width": 4096,
        "splits": 4,
        "tiles": [tile(24, 16), tile(48, 32), tile(None, 64)],
        "mixed_tiles": [tile(30, 32), tile(None, 128)],
    }
    table["sm_90"] = table["default"] | {"shrink": [narrow, table["default"]["shrink"][-1]]}
    path = tmp_path / "table.json"
    write_json(path, table)
    sizes = read_sizes(path)["sm_90"]
    assert [sizes.select_shrink(width).splits for width in (1, 4096, 4097)] == [4, 4, 16]
    ranks = (1, 24, 25, 48, 49, 999)
    of_width = sizes.select_shrink(64)
    chosen = [[of_width.tile(rank, has_chunks=has).block_rank for rank in ranks] for has in (False, True)]
    assert chosen == [[16, 16, 32, 32, 64, 64], [32, 32, 32, 128, 128, 128]]


@pytest.mark.parametrize(
    ("harm", "message"),
    (
        (lambda t: t.pop("default"), "table.json has no entry 'default'; add the sizes"),
        (lambda t: t["default"].pop("expand"), r"default has only the fields \['shrink'\]; add 'expand'"),
        (lambda t: t["default"]["shrink"].clear(), r"default.shrink is \[\]; it must be a list"),
        (lambda t: t.update(sm_90=3), "sm_90 is 3; it must be an object"),
        (
            lambda t: t["default"]["shrink"][0]["tiles"][0].update(num_warps=3),
            r"shrink\[0\].tiles\[0\].num_warps is 3; it must be one of 1, 2, 4, 8",
        ),
        (lambda t: t["default"]["shrink"][0].update(splits=True), "splits is True; it must be one of 1, 2"),
        (lambda t: t["default"]["expand"][0].pop("rows"), r"expand\[0\] has only the fields .*; add 'rows'"),
        (lambda t: t["default"]["expand"][0]["rows"].update(block_rank=3), "rows.block_rank is 3"),
        (
            lambda t: t["default"]["expand"][0].update(max_width=9),
            r"values of max_width are \[9\]; .* null at the end",
        ),
        (
            lambda t: t["default"]["expand"].insert(0, t["default"]["expand"][0]),
            r"max_width are \[None, None\]; they must be ascending integers",
        ),
    ),
)
def test_an_invalid_table_is_refused_with_the_place_and_the_valid_values(
    tmp_path: Path, harm: Break, message: str
) -> None:
    table = read_json(SIZES_FILE)
    harm(table)
    path = tmp_path / "table.json"
    write_json(path, table)
    with pytest.raises(ValueError, match=message):
        read_sizes(path)


def test_a_table_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"table.json is not JSON .*tune"):
        read_sizes(path)
