import json

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from slora_adapters.peft.tensor_file import read_tensors

tensors = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F16", "BF16"]), "shape": st.lists(st.integers(0, 5), max_size=3)}
)
files = st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), tensors, max_size=5)


def _file(header: object, body: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@given(files, st.integers(0, 1 << 30))
def test_files_of_the_reference_writer_are_read_to_the_byte(contents: dict, seed: int) -> None:
    torch.manual_seed(seed)
    written = {name: _random_tensor(**spec) for name, spec in contents.items()}
    read = read_tensors(save(written, {"format": "pt"}))
    assert {name: (t.dtype, list(t.shape), t.values.tobytes()) for name, t in read.items()} == {
        name: (spec["dtype"], spec["shape"], _bytes(written[name])) for name, spec in contents.items()
    }


def _random_tensor(dtype: str, shape: list[int]) -> torch.Tensor:
    bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int32 if dtype == "F32" else torch.int16)
    return bits.view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@given(st.data())
def test_a_damaged_file_is_refused_or_read_as_the_reference_reads_it(data: st.DataObject) -> None:
    header = {"a": _entry("F32", [2, 3], 0, 24), "b": _entry("F16", [4], 24, 32)}
    raw = bytearray(_file(header, bytes(range(32))))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        ours = read_tensors(bytes(raw))
    except ValueError:
        return
    try:
        theirs = dict(deserialize(bytes(raw)))
    except SafetensorError as error:
        raise AssertionError(f"the reference reader refuses this file: {error}") from None
    assert {name: tensor.values.tobytes() for name, tensor in ours.items()} == {
        name: bytes(tensor["data"]) for name, tensor in theirs.items()
    }


def test_reading_copies_no_tensor() -> None:
    raw = _file({"a": _entry("F32", [2], 0, 8)}, bytes(8))
    values = read_tensors(raw)["a"].values
    assert np.shares_memory(values, np.frombuffer(raw, np.uint8))
    assert not values.flags.writeable
