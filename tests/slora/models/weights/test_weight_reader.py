import logging
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slora.core.errors import ConfigError
from slora.models.weights import weight_blocks, weight_reader
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.linear import QuantizedWeight
from slora.models.weights.weight_reader import LinearPart, WeightReader
from tests.support.terminal import Terminal

CPU = torch.device("cpu")
# Row counts that neither fill a block nor divide it, in all dtypes of checkpoints.
TENSORS = {
    "a": torch.randn(7, 33, dtype=torch.bfloat16),
    "b": torch.randn(50, 33),
    "c": torch.randn(1, 33).half(),
    "bias": torch.randn(58).double(),
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of TENSORS, read in blocks of a few rows and in parts of a few blocks."""
    monkeypatch.setattr(weight_reader, "_BLOCK_BYTES", 400)
    monkeypatch.setattr(weight_blocks, "_PART_BYTES", 1000)
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def whole(tensors: list[tuple[str, int]], width: int) -> list[LinearPart]:
    return [LinearPart(name, (rows, width), (range(rows),), range(width)) for name, rows in tensors]


def open_reader(directory: Path, dtype: torch.dtype, form: torch.dtype | None = None) -> WeightReader:
    return WeightReader(Checkpoint(directory), dtype, CPU, form=form)


def read_all(directory: Path, form: torch.dtype | None = None) -> None:
    reader = open_reader(directory, torch.float32, form)
    reader.linear(whole([("a", 7), ("b", 50), ("c", 1)], 33))
    reader.vector("bias", 58)
    reader.read()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_parts_are_fused_in_the_served_dtype_whatever_they_are_stored_in(
    directory: Path, dtype: torch.dtype
) -> None:
    reader = open_reader(directory, dtype)
    weight = reader.linear(whole([("b", 50), ("a", 7), ("c", 1)], 33))
    bias = reader.vector("bias", 58)
    reader.read()
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, torch.cat([TENSORS[name].to(dtype) for name in "bac"]))
    assert torch.equal(bias, TENSORS["bias"].to(dtype))


@pytest.mark.parametrize("form", (torch.int8, torch.float8_e4m3fn))
def test_weights_are_rounded_row_by_row_to_the_nearest_number(directory: Path, form: torch.dtype) -> None:
    reader = open_reader(directory, torch.float32, form)
    weight = reader.linear(whole([("b", 50), ("a", 7), ("c", 1)], 33))
    reader.vector("bias", 58)
    reader.read()
    assert isinstance(weight, QuantizedWeight) and weight.values.dtype == form
    exact = torch.cat([TENSORS[name].float() for name in "bac"])
    largest = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[form]
    torch.testing.assert_close(weight.scales, exact.abs().amax(1) / largest)
    error = (weight.values.float() * weight.scales[:, None] - exact).abs()
    # The tolerance is half a step. A step is the row's scale in int8. In float8 it is at most an eighth of the number,
    # or 2^-9 times the scale for the smallest numbers.
    steps = exact.abs() / 8 if form != torch.int8 else torch.ones_like(exact) * weight.scales[:, None]
    assert (error <= 0.501 * torch.maximum(steps, weight.scales[:, None] * 2**-9)).all()


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    for form in (torch.int8, torch.float8_e4m3fn):
        reader = open_reader(tmp_path, torch.float32, form)
        weight = reader.linear(whole([("a", 2)], 4))
        reader.read()
        assert isinstance(weight, QuantizedWeight)
        assert weight.values.float().eq(0).all() and weight.scales.isfinite().all()


@pytest.mark.parametrize("number", (torch.nan, torch.inf))
def test_numbers_that_cannot_be_rounded_are_refused_by_the_tensors_name(
    tmp_path: Path, number: float
) -> None:
    save_file({"a": torch.tensor([[1.0, number]])}, tmp_path / "model.safetensors")
    reader = open_reader(tmp_path, torch.float32, torch.int8)
    reader.linear(whole([("a", 1)], 2))
    with pytest.raises(ConfigError, match=r"model\.safetensors: a contains numbers that are not finite"):
        reader.read()


def test_an_unexpected_tensor_is_refused(directory: Path) -> None:
    reader = open_reader(directory, torch.float32)
    reader.linear(whole([("a", 7), ("b", 50), ("c", 1)], 33))
    with pytest.raises(
        ConfigError, match=r"has 1 tensors that its config\.json does not describe, such as 'bias'"
    ):
        reader.read()


def test_tables_that_follow_from_the_config_may_be_there(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({"a": torch.ones(1, 2), **extra}, tmp_path / "model.safetensors")
    reader = open_reader(tmp_path, torch.float32)
    weight = reader.matrix("a", 1, 2)
    reader.read()
    assert torch.equal(weight, torch.ones(1, 2))


def test_a_file_that_shrinks_while_it_is_read_is_named(directory: Path) -> None:
    reader = open_reader(directory, torch.float32)
    reader.linear(whole([("a", 7), ("b", 50), ("c", 1)], 33))
    reader.vector("bias", 58)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"model\.safetensors ends at byte \d+, within "):
        reader.read()


def test_a_tensor_is_the_same_as_another_only_if_all_its_bytes_are(directory: Path) -> None:
    copy, other = TENSORS["b"].clone(), TENSORS["b"].clone()
    other[-1, -1] += 1
    save_file({**TENSORS, "copy": copy, "other": other}, directory / "model.safetensors")
    reader = open_reader(directory, torch.float32)
    assert reader.is_absent_or_same("missing", "b")
    assert reader.is_absent_or_same("copy", "b")
    assert not reader.is_absent_or_same("other", "b")
    assert not reader.is_absent_or_same("a", "b")


@pytest.mark.parametrize(("level", "shown"), ((logging.WARNING, True), (logging.ERROR, False)))
def test_progress_is_shown_on_a_terminal_unless_the_log_is_to_be_quiet(
    directory: Path, caplog: pytest.LogCaptureFixture, level: int, *, shown: bool
) -> None:
    caplog.set_level(level, "slora.models.weights.weight_reader")
    with redirect_stderr(Terminal()) as terminal:
        read_all(directory)
    assert ("Weights" in terminal.getvalue()) == shown


def test_progress_is_not_shown_without_a_terminal(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    read_all(directory)
    assert capfd.readouterr() == ("", "")


def test_reading_restores_the_number_of_torch_threads(directory: Path) -> None:
    before = torch.get_num_threads()
    for form in (None, torch.int8):
        read_all(directory, form)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("form", [None, torch.int8])
def test_the_parts_of_two_ranks_together_equal_the_weight_of_one(
    directory: Path, form: torch.dtype | None
) -> None:
    def read(parts: list[LinearPart]) -> torch.Tensor:
        reader = open_reader(directory, torch.float32, form)
        weight = reader.linear(parts)
        reader.vector("bias", 58)
        for name in "abc":
            reader.matrix(name, len(TENSORS[name]), 33)
        reader.read()
        return weight.values if isinstance(weight, QuantizedWeight) else weight

    expected = read(whole([("b", 50)], 33))
    rows = (range(40, 50), range(3, 11))
    by_rows = read([LinearPart("b", (50, 33), rows, range(33))])
    assert torch.equal(by_rows, torch.cat([expected[40:50], expected[3:11]]))
    by_columns = [read([LinearPart("b", (50, 33), (range(50),), cut)]) for cut in (range(20), range(20, 33))]
    assert torch.equal(torch.cat(by_columns, dim=1), expected)
