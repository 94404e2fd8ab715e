import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest

from slora_adapters.errors import AdapterInvalid
from slora_adapters.inspection.inspection_process import inspect
from slora_adapters.peft.adapter import AdapterLimits, LoraPair, delta_norm
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.peft.tensor_file import StoredTensor, convert
from tests.adapters.hand_made import (
    SHAPE,
    make_config,
    make_members,
    make_tensors,
    tensor_name,
    write_directory,
)
from tests.api.adapters.hostile_uploads import (
    FIELDS,
    MAX_RANK,
    MAX_UPLOAD,
    HostileUpload,
    kinds,
    make_tar,
    make_zip,
)

LIMITS = AdapterLimits(
    max_lora_rank=MAX_RANK,
    max_tensor_bytes=MAX_UPLOAD,
    vocab_size=SHAPE.vocab_size,
    base_directory=Path("/nowhere"),
)
NAMES = {field: name for name, field in FIELDS.items()}


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def _write(one: HostileUpload, directory: Path) -> Path:
    """Writes the files of an upload into quarantine, as the API does."""
    directory.mkdir()
    for field, _name, raw in one.parts:
        if field == "archive":
            (directory / "archive").write_bytes(raw)
            return directory / "archive"
        (directory / NAMES[field]).write_bytes(raw)
    return directory


def test_each_hostile_adapter_is_refused_for_its_own_reason(tmp_path: Path, soak: bool) -> None:
    wrong = []
    corpus = {name: one for name, one in kinds(SHAPE).items() if one.inspected}
    if not soak:
        # tests/adapters/peft/test_targeting.py waits for one such pattern.
        corpus = {name: one for name, one in corpus.items() if "take for ever" not in name}
    for at, (name, one) in enumerate(corpus.items()):
        scratch = tmp_path / str(at)
        scratch.mkdir()
        try:
            inspect(_write(one, scratch / "upload"), scratch, SHAPE, LIMITS)
        except AdapterInvalid as error:
            if one.words in str(error) and one.code in {reason.code for reason in error.reasons}:
                continue
            wrong.append(f"{name}: {error}, expected {one.words!r}")
        else:
            wrong.append(f"{name}: accepted")
    assert not wrong, "\n".join(wrong)
    # Whatever the names in the archives, files were written only to the intended folders.
    assert len(list(tmp_path.iterdir())) == len(corpus) > 100


MEMBERS = make_members(chat_template_dot_jinja="{{ messages }}")
TEMPLATE = MEMBERS["chat_template.jinja"]
# Other files that users' archives contain: folders, notes, files of operating systems, and what Trainer writes.
BESIDES = {
    "README.md": b"# mine",
    "training/log.json": b"{}",
    "training_args.bin": b"\x80\x04.",
    "optimizer.pt": b"PK\x03\x04",
    "scheduler.pt": b"PK\x03\x04",
    "rng_state_0.pth": b"PK\x03\x04",
    "trainer_state.json": b"{}",
    "tokenizer.model": b"x",
    "__MACOSX/._adapter_config.json": b"x",
    ".DS_Store": b"",
}
ARCHIVES = {
    "zip": make_zip(MEMBERS),
    "zip, one folder": make_zip({"mine/": b"", **{f"mine/{name}": raw for name, raw in MEMBERS.items()}}),
    "zip, with other files": make_zip({**MEMBERS, **BESIDES}),
    "tar": make_tar(list(MEMBERS.items())),
    "tar, from within": make_tar([(f"./{name}", raw) for name, raw in MEMBERS.items()]),
    "tar.gz, one folder": gzip.compress(make_tar([(f"mine/{name}", raw) for name, raw in MEMBERS.items()])),
    "tar.gz, with other files": gzip.compress(make_tar([*MEMBERS.items(), *BESIDES.items()])),
    "tar, as GNU writes it": make_tar(list(MEMBERS.items()), tarfile.GNU_FORMAT),
    "tar, as of old": make_tar(list(MEMBERS.items()), tarfile.USTAR_FORMAT),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_is_the_adapter_that_was_packed(kind: str, tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "archive").write_bytes(ARCHIVES[kind])
    checked = inspect(tmp_path / "archive", scratch, SHAPE, LIMITS)
    directory = write_directory(tmp_path / "plain", MEMBERS)
    assert checked.digest == read_adapter(directory, SHAPE, LIMITS).digest
    assert checked.extras.chat_template == TEMPLATE.decode()
    # None of the other files was written.
    assert {path.name for path in scratch.rglob("*") if path.is_file()} == set(MEMBERS)


def test_an_adapter_is_without_effect_only_if_all_of_its_modules_are(tmp_path: Path, scratch: Path) -> None:
    tensors = make_tensors()
    for name in list(tensors)[2:]:
        tensors[name][:] = -0.0
    write_directory(tmp_path / "one", make_members(tensors=tensors))
    assert inspect(tmp_path / "one", scratch, SHAPE, LIMITS).rank == 2
    tensors[next(name for name in tensors if "lora_A" in name)][:] = 0
    write_directory(tmp_path / "none", make_members(tensors=tensors))
    with pytest.raises(AdapterInvalid, match="lora_A or lora_B is zero in each of the 4 modules"):
        inspect(tmp_path / "none", scratch, SHAPE, LIMITS)


def test_the_certificate_lists_the_adapted_modules_and_the_size_of_their_change(
    tmp_path: Path, scratch: Path
) -> None:
    tensors = make_tensors()
    config = make_config(base_model_name_or_path="/home/somebody/tiny-base/")
    write_directory(tmp_path / "up", make_members(config, tensors))
    certificate = inspect(tmp_path / "up", scratch, SHAPE, LIMITS).certificate
    assert certificate.base_name == "tiny-base"
    assert (certificate.adapted, certificate.base_modules) == (4, 16)
    norms = [
        np.linalg.norm(2.0 * tensors[tensor_name(layer, 0, "B")] @ tensors[tensor_name(layer, 0, "A")])
        for layer in range(2)
    ]
    summary = certificate.modules["q_proj"]
    assert (summary.adapted, summary.total, summary.min_rank, summary.max_rank) == (2, 2, 2, 2)
    assert summary.max_norm == pytest.approx(max(norms), rel=1e-3)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_norm_of_a_delta_is_that_of_its_matrix_in_every_format(dtype: str) -> None:
    values = np.random.default_rng(3)
    a, b = values.standard_normal((5, 20_000), np.float32), values.standard_normal((70, 5), np.float32)
    pair = LoraPair("x", _stored(a, dtype), _stored(b, dtype), -0.5)
    assert delta_norm(pair) == pytest.approx(0.5 * np.linalg.norm(b.astype(float) @ a), rel=1e-2)
    # The squares of these numbers overflow in float32.
    huge = LoraPair("x", _stored(np.full((1, 2), 6e4), dtype), _stored(np.full((2, 1), 6e4), dtype), 1e4)
    assert delta_norm(huge) == pytest.approx(2 * 3.6e9 * 1e4, rel=1e-2)


def _stored(values: np.ndarray, dtype: str) -> StoredTensor:
    served = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    return StoredTensor("x", dtype, convert(values.astype(np.float32), "F32", served))
