"""Tensors of bitsandbytes that are damaged, or that bitsandbytes itself would read in several ways.

`test_stored_codes` compares the numbers and the answers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slora.core.errors import ConfigError
from slora.models.weights.bitsandbytes_codes import TABLES
from tests.slora.models.weights.test_stored_codes import FORMS, read_weight, write_linears
from tests.support.coded_checkpoints import TABLES as OWN_TABLES
from tests.support.coded_checkpoints import write_codes

NF4 = FORMS["nf4"]
STATE = "a.weight.quant_state.bitsandbytes__nf4"


def change_tensors(directory: Path, **changes: Tensor | None) -> None:
    """Replaces or removes tensors of the linear a. Their names end in the given names."""
    path = directory / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(path)}
    tensors |= {f"a.{name.replace('__', '.')}": tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def change_state(directory: Path, **changes: Any) -> None:
    """Changes fields of the JSON object that describes the linear a. A field that becomes None is removed."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    state = json.loads(bytes(tensors[STATE].tolist())) | changes
    content = json.dumps({key: value for key, value in state.items() if value is not None}).encode()
    save_file(tensors | {STATE: torch.tensor(list(content), dtype=torch.uint8)}, path)


@pytest.mark.parametrize("form", TABLES)
def test_tables_are_those_that_define_the_forms(form: str) -> None:
    assert torch.equal(TABLES[form], OWN_TABLES[form])


DAMAGES: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "absent": ({"weight__absmax": None}, r"has no tensor 'a.weight.absmax'"),
    "few": ({"weight__absmax": torch.ones(15).byte()}, r"absmax has shape \[15\]; .* requires \[16\]"),
    "float": ({"weight__absmax": torch.ones(16)}, r"a\.weight\.absmax is F32; it must be U8"),
    "nested_float": (
        {"weight__nested_absmax": torch.ones(1).half()},
        r"nested_absmax is F16; it must be F32",
    ),
    "infinite": (
        {"weight__nested_absmax": torch.full((1,), torch.inf)},
        r"a\.weight has scales \(absmax\) that are not finite; the checkpoint is damaged",
    ),
    "map": (
        {"weight__quant_map": torch.linspace(-1, 1, 16)},
        r"a\.weight\.quant_map has other numbers than nf4, which some versions .*use the unquantized",
    ),
    "row": ({"weight": torch.zeros(1, 512).byte()}, r"a\.weight has shape \[1, 512\]; .* \[512, 1\]"),
    "words": ({"weight": torch.zeros(128, 1).int()}, r"a\.weight is I32; .* are read in U8, I8, F16"),
    "unknown": ({"weight__other": torch.ones(1)}, r"does not describe, such as 'a\.weight\.other'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_tensors_that_do_not_belong_together_are_refused(tmp_path: Path, name: str) -> None:
    write_linears(tmp_path, NF4, 128, a=8)
    changes, said = DAMAGES[name]
    change_tensors(tmp_path, **changes)
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, NF4, [("a", 8)], 128)


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"quant_type": "fp4"}, r"quant_type is 'fp4'; it must be 'nf4'"),
    "shape": ({"shape": [16, 64]}, r"shape is \[16, 64\]; it must be \[8, 128\]"),
    "small_blocks": ({"blocksize": 16}, r"blocksize is 16; it must be a multiple of 32: use the unquantized"),
    "no_blocks": ({"blocksize": None}, r"blocksize is None; it must be a multiple of 32"),
    "blocks_of_two_rows": ({"blocksize": 256}, r"a\.weight has 128 columns; .* need a multiple of 256"),
    "dtype_of_scales": ({"nested_dtype": "float16"}, r"nested_dtype is 'float16'; it must be 'float32'"),
    "nested_blocks": ({"nested_blocksize": 0}, r"nested_blocksize is 0; it must be a positive whole number"),
    "offset": ({"nested_offset": "1"}, r"nested_offset is '1'; it must be a number"),
    "no_offset": ({"nested_offset": None}, r"nested_offset is None; it must be a number"),
    "not_a_number": ({"nested_offset": float("nan")}, r"scales \(absmax\) that are not finite"),
    "unknown": ({"rotation": "hadamard"}, r"has the unknown field 'rotation'; known are quant_type"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_description_with_other_fields_is_refused(tmp_path: Path, name: str) -> None:
    write_linears(tmp_path, NF4, 128, a=8)
    changes, said = STATES[name]
    change_state(tmp_path, **changes)
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, NF4, [("a", 8)], 128)


@pytest.mark.parametrize(("content", "said"), [(b"{", "is not JSON"), (b"[]", "holds a list; it must be a")])
def test_a_description_that_is_no_object_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    write_linears(tmp_path, NF4, 128, a=8)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {STATE: torch.tensor(list(content), dtype=torch.uint8)}, path)
    with pytest.raises(ConfigError, match=rf"bitsandbytes__nf4 {said}"):
        read_weight(tmp_path, NF4, [("a", 8)], 128)


def test_another_type_than_that_of_the_config_is_refused(tmp_path: Path) -> None:
    write_linears(tmp_path, FORMS["fp4"], 128, a=8)
    said = r"a\.weight is stored in fp4, but quantization_config says nf4 .*correct it in config\.json"
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, NF4, [("a", 8)], 128)


def test_a_rank_with_a_part_of_a_block_is_refused(tmp_path: Path) -> None:
    write_linears(tmp_path, NF4, 128, a=8)
    said = r"a\.weight has 128 columns, .* computes 32 to 127.*groups of 64.*smaller --tensor-parallel-size"
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, NF4, [("a", 8)], 128, range(32, 128))


def test_linears_of_one_product_have_blocks_of_one_size(tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for linear, size in (("a", 64), ("b", 32))
        for name, tensor in write_codes(
            f"{linear}.weight", torch.randn(8, 128), replace(NF4, group=size)
        ).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    said = (
        r"a\.weight and b\.weight are multiplied together, but .* groups of other sizes; use the unquantized"
    )
    with pytest.raises(ConfigError, match=said):
        read_weight(tmp_path, NF4, [("a", 8), ("b", 8)], 128)
