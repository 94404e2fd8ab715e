"""An adapter that is read from a store in pieces equals one that is read at once, and always matches its digest."""

import itertools
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread

import numpy as np
import pytest

from slora_adapters.errors import AdapterCorrupt, AdapterNotFound
from slora_adapters.loader import stored_adapter
from slora_adapters.loader.stored_adapter import BATCH_BYTES, NUM_BUFFERS, StoredAdapter, make_buffers
from slora_adapters.peft.adapter import AdapterLimits, adapter_digest
from slora_adapters.peft.packing import Packer, pack
from slora_adapters.peft.peft_config import parse_peft_config
from slora_adapters.peft.peft_directory import parse_adapter
from slora_adapters.peft.tensor_file import read_tensors
from slora_adapters.store.file_store import LocalBlob
from slora_kernels.layout import AFFINE_SEGMENT
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = {"F32": np.float32, "F16": np.float16}


def _file(order: list[str], tensors: dict[str, np.ndarray], **metadata: str) -> bytes:
    """A safetensors file with its tensors in the given order. The safetensors library cannot choose the order."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in order:
        dtype = {np.dtype(numpy): dtype for dtype, numpy in DTYPES.items()}[tensors[name].dtype]
        header[name] = {
            "dtype": dtype,
            "shape": tensors[name].shape,
            "data_offsets": [end, end + tensors[name].nbytes],
        }
        end += tensors[name].nbytes
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"".join(tensors[name].tobytes() for name in order)


def _digest(members: dict[str, bytes]) -> str:
    return parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits()).digest


class CountingBlob(LocalBlob):
    """Records the position, the size and the buffer of each read of the tensors file."""

    def __init__(self, members: dict[str, bytes]) -> None:
        super().__init__(members)
        self.buffers: dict[int, object] = {}
        self.sizes: list[int] = []
        self.starts: list[int] = []

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if name == TENSORS and start:
            self.starts.append(start)
            self.sizes.append(len(buffer))
        super().read_into(name, start, buffer)
        if len(self.starts) > 1:  # after the header was read
            self.buffers[id(buffer.obj)] = buffer.obj


def _pour(blob: LocalBlob, digest: str, batch_bytes: int = BATCH_BYTES) -> tuple[np.ndarray, np.ndarray]:
    stored = StoredAdapter(blob, digest, SHAPE, AdapterLimits())
    region = np.full(stored.layout.num_bytes, 0xA5, np.uint8)
    scales = stored.pour(region, "float32", make_buffers(batch_bytes))
    return region, scales


@pytest.mark.parametrize("batch_bytes", [1, 100, 700, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_adapter_does_not_depend_on_piece_sizes_and_file_order(batch_bytes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors = make_tensors(rank=3, seed=seed)
    for name in random.choice(list(tensors), seed, replace=False):
        tensors[name] = tensors[name].astype(np.float16)
    order = sorted(tensors) if seed == 0 else list(random.permutation(list(tensors)))
    config = json.dumps(make_config(r=3, alpha_pattern={"q_proj": 5}, slora_digest=2)).encode()
    members = {CONFIG: config, TENSORS: _file(order, tensors, trained="by me")}
    adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits())
    expected = pack(adapter, SHAPE, "float32")
    blob = CountingBlob(members)
    region, scales = _pour(blob, adapter.digest, batch_bytes)
    assert np.array_equal(region, expected.buffer) and np.array_equal(scales, expected.scales)
    rows = max(tensor.itemsize * tensor.shape[1] for tensor in tensors.values())
    assert max(blob.sizes[1:]) <= max(batch_bytes, rows), "the header, then batches"
    if seed == 0:
        assert blob.starts == sorted(blob.starts), "read from its begin to its end"


@pytest.mark.parametrize("kept", [0, 1024])
def test_adapters_of_one_recipe_are_loaded_side_by_side(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the plan of their loads, and nothing else."""
    monkeypatch.setattr(stored_adapter, "_NUM_KEPT_BATCHES", kept)
    config = make_config(r=5, alpha_pattern={"q_proj": 5 + kept})
    loads = [make_members(config, make_tensors(rank=5, seed=seed)) for seed in range(8)]
    expected = [
        pack(
            parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits()),
            SHAPE,
            "float32",
        )
        for members in loads
    ]
    with ThreadPoolExecutor(4) as threads:
        poured = threads.map(lambda members: _pour(LocalBlob(members), _digest(members), 100), loads * 3)
        for (region, scales), packed in zip(poured, expected * 3, strict=True):
            assert np.array_equal(region, packed.buffer) and np.array_equal(scales, packed.scales)
            scales[:] = 0


@pytest.mark.parametrize("batch_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_magnitudes_and_biases_of_each_rank_do_not_depend_on_piece_sizes(
    batch_bytes: int, num_ranks: int
) -> None:
    shape = replace(SHAPE, linears=tuple(replace(linear, has_bias=True) for linear in SHAPE.linears))
    random, tensors = np.random.default_rng(0), make_tensors()
    for name, tensor in list(tensors.items()):
        if "lora_B" in name:
            width = len(tensor)
            for vector in ("lora_magnitude_vector", "base_layer.bias"):
                tensors[name.replace("lora_B.weight", vector)] = random.standard_normal(width, np.float32)
    members = make_members(make_config(use_dora=True, bias="lora_only"), tensors)
    adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, shape, AdapterLimits())
    packed = pack(adapter, shape, "float32", num_ranks)
    stored = StoredAdapter(LocalBlob(members), adapter.digest, shape, AdapterLimits(), num_ranks)
    region = np.full(packed.num_bytes, 0xA5, np.uint8)
    stored.pour(region, "float32", make_buffers(batch_bytes))
    assert np.array_equal(region, packed.buffer)
    # q_proj is divided by its outputs, and down_proj by its inputs, so that rank 0 alone adds the bias.
    for module_id, rank in itertools.product((0, 6), range(num_ranks)):
        pair, bias = adapter.pairs[module_id], adapter.tensors.biases[module_id]
        assert pair.magnitude is not None
        rows = slice(rank * 24 // num_ranks, (rank + 1) * 24 // num_ranks) if module_id == 0 else slice(None)
        expected_bias = bias.values[rows] if module_id == 0 or rank == 0 else np.zeros(24, np.float32)
        _, segment, *_ = packed.layout.affine[module_id]
        width = len(expected_bias)
        floats = packed.part(rank).view(np.float32).reshape(-1, AFFINE_SEGMENT)
        assert np.array_equal(floats[segment, :width], pair.magnitude.values[rows])
        assert np.array_equal(floats[segment + 1, :width], expected_bias)


@pytest.mark.parametrize("batch_bytes", [1, 100, 1 << 20])
def test_rows_of_tokens_are_stored_in_the_order_of_their_ids_on_each_rank(batch_bytes: int) -> None:
    random, tensors = np.random.default_rng(0), make_tensors()
    prefix = "base_model.model."
    trained = random.standard_normal((3, SHAPE.hidden_size), np.float32)
    head = random.standard_normal((SHAPE.vocab_size, SHAPE.hidden_size), np.float32)
    tensors[f"{prefix}model.embed_tokens.token_adapter.trainable_tokens_delta"] = trained
    tensors[f"{prefix}lm_head.weight"] = head
    config = make_config(trainable_token_indices=[40, 2, 11], modules_to_save=["lm_head"])
    members = make_members(config, tensors)
    adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits())
    packed = pack(adapter, SHAPE, "float32", 2)
    stored = StoredAdapter(LocalBlob(members), adapter.digest, SHAPE, AdapterLimits(), 2)
    region = np.full(packed.num_bytes, 0xA5, np.uint8)
    stored.pour(region, "float32", make_buffers(batch_bytes))
    assert np.array_equal(region, packed.buffer)
    expected = (([2, 11, 40], trained[[1, 2, 0]]), (list(range(SHAPE.vocab_size)), head))
    for rank, (place, (ids, rows)) in itertools.product(range(2), enumerate(expected)):
        count, first_id, first_row = packed.layout.rows[place].tolist()
        floats = packed.part(rank).view(np.float32).reshape(-1, AFFINE_SEGMENT)
        assert floats[first_id].view(np.int32)[: len(ids)].tolist() == ids and count == len(ids)
        assert np.array_equal(floats[first_row : first_row + count, : SHAPE.hidden_size], rows)


def test_blobs_with_one_config_and_header_have_their_own_weights_and_the_limits_of_each_load() -> None:
    for seed in (1, 2, 1):
        members = make_members(tensors=make_tensors(seed=seed))
        adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits())
        region, _ = _pour(LocalBlob(members), adapter.digest)
        assert np.array_equal(region, pack(adapter, SHAPE, "float32").buffer)
        for _ in range(2):
            with pytest.raises(AdapterCorrupt, match="accepts at most 1 "):
                StoredAdapter(LocalBlob(members), adapter.digest, SHAPE, AdapterLimits(max_lora_rank=1))
        expected = pack(adapter, SHAPE, "float32", 2)
        both_ranks = np.empty(expected.num_bytes, np.uint8)
        stored = StoredAdapter(LocalBlob(members), adapter.digest, SHAPE, AdapterLimits(), 2)
        stored.pour(both_ranks, "float32", make_buffers())
        assert np.array_equal(both_ranks, expected.buffer)


def test_long_configs_do_not_stay_in_memory() -> None:
    members, limits = make_members(), AdapterLimits()
    digest = _digest(members)
    tracemalloc.start()
    for number in range(20):
        config = members[CONFIG] + b" " * (900_000 + number)
        StoredAdapter(LocalBlob({**members, CONFIG: config}), digest, SHAPE, limits)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert num_bytes < 2 << 20


def test_a_load_holds_a_few_batches_however_large_the_adapter() -> None:
    members = make_members()
    blob = CountingBlob(members)
    _pour(blob, _digest(members), 160)
    assert len(blob.sizes) > 2 * NUM_BUFFERS and max(blob.sizes[1:]) <= 160
    assert len(blob.buffers) <= NUM_BUFFERS


def test_a_row_longer_than_a_batch_is_read_whole() -> None:
    members = make_members()
    blob = CountingBlob(members)
    _pour(blob, _digest(members), 8)
    assert max(blob.sizes[1:]) == 40 * 4, "of A of down_proj"


@pytest.mark.parametrize("at", [-1, -300, -900])
def test_a_flipped_bit_anywhere_in_the_tensors_is_found(at: int) -> None:
    members = make_members()
    digest = _digest(members)
    raw = bytearray(members[TENSORS])
    raw[at] ^= 1
    with pytest.raises(AdapterCorrupt, match="have the digest"):
        _pour(LocalBlob({**members, TENSORS: bytes(raw)}), digest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({CONFIG: None}, "adapter_config.json is missing"),
        ({TENSORS: None}, "adapter_model.safetensors is missing"),
        ({CONFIG: b"{"}, "not valid JSON"),
        ({CONFIG: b" " * (2 << 20)}, "this server accepts"),
        ({TENSORS: b"1234"}, "too short"),
        ({TENSORS: (9 << 40).to_bytes(8, "little")}, "at most 1048576"),
        ({TENSORS: (99).to_bytes(8, "little")}, "but the file ends after 0"),
        ({CONFIG: json.dumps(make_config(r=4)).encode()}, "the config and the base model require"),
        ({CONFIG: json.dumps(make_config(lora_alpha=5)).encode()}, "have the digest"),
    ],
)
def test_a_blob_that_differs_from_the_digest_is_corrupt(
    change: dict[str, bytes | None], message: str
) -> None:
    members = make_members()
    digest = _digest(members)
    changed = {name: raw for name, raw in {**members, **change}.items() if raw is not None}
    with pytest.raises(AdapterCorrupt, match=message):
        _pour(LocalBlob(changed), digest)


def test_a_file_cut_short_or_too_long_is_corrupt() -> None:
    members = make_members()
    digest = _digest(members)
    for raw in (members[TENSORS][:-1], members[TENSORS] + b"x"):
        with pytest.raises(AdapterCorrupt, match=r"is truncated|continues after"):
            _pour(LocalBlob({**members, TENSORS: raw}), digest)


def test_weights_that_overflow_in_the_served_dtype_are_corrupt() -> None:
    tensors = make_tensors()
    next(iter(tensors.values()))[0, 0] = 3.4e38
    members = make_members(tensors=tensors)
    narrow = AdapterLimits(served_dtype="bfloat16")
    stored = StoredAdapter(LocalBlob(members), _digest(members), replace(SHAPE, element_bytes=2), narrow)
    with pytest.raises(AdapterCorrupt, match="overflows in bfloat16"):
        stored.pour(np.empty(stored.layout.num_bytes, np.uint8), "bfloat16", make_buffers())


def test_nothing_writes_to_the_region_once_a_load_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed load, the region may be given to another adapter."""
    may_pack, write = Event(), Packer.write

    def write_late(self: Packer, *arguments: object) -> None:
        assert may_pack.wait(300)
        write(self, *arguments)

    class Breaking(CountingBlob):
        def read_into(self, name: str, start: int, buffer: memoryview) -> None:
            super().read_into(name, start, buffer)
            if len(self.sizes) == 4:
                raise AdapterNotFound("gone")

    monkeypatch.setattr(Packer, "write", write_late)
    members = make_members()
    failures: list[Exception] = []

    def load() -> None:
        try:
            _pour(Breaking(members), _digest(members), 100)
        except AdapterNotFound as error:
            failures.append(error)

    thread = Thread(target=load)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not failures, "it waits for what is being packed"
    may_pack.set()
    thread.join(300)
    assert failures


def _store_as_before(**changes: object) -> tuple[LocalBlob, str]:
    """A blob of slora 0.1, whose config and digest have the patterns of the upload."""
    raw = json.dumps(make_config(**changes)).encode()
    members = {**make_members(), CONFIG: raw}
    config, _ = parse_peft_config(raw)
    assert config is not None
    return LocalBlob(members), adapter_digest(config, read_tensors(memoryview(members[TENSORS])))


# The digest in earlier versions of slora, which hashed with SHA-256, of an adapter whose weights are all 0.5.
_OLD_DIGEST = "aa7006118191e6a45293e7693ce14d49a757d292e37b9c2261a624687b3e65b4"


def test_an_adapter_that_was_registered_with_sha_256_loads_and_is_verified() -> None:
    tensors = {name: np.full(value.shape, 0.5, np.float32) for name, value in make_tensors().items()}
    members = make_members(tensors=tensors)
    adapter = parse_adapter({n: memoryview(raw) for n, raw in members.items()}, SHAPE, AdapterLimits())
    expected = pack(adapter, SHAPE, "float32")
    marked = members | {CONFIG: json.dumps(make_config(slora_digest=2)).encode()}
    # A hint that is wrong makes the load read everything twice.
    for stored, digest, num_passes in (
        (members, _OLD_DIGEST, 1),
        (marked, _OLD_DIGEST, 2),
        (marked, adapter.digest, 1),
        (members, adapter.digest, 2),
    ):
        blob = CountingBlob(stored)
        region, scales = _pour(blob, digest, 700)
        assert np.array_equal(region, expected.buffer) and np.array_equal(scales, expected.scales)
        assert blob.starts[1:].count(blob.starts[1]) == num_passes
        raw = bytearray(members[TENSORS])
        raw[-300] ^= 1
        with pytest.raises(AdapterCorrupt, match=f"stored adapter {digest[:12]} have the digest"):
            _pour(LocalBlob({**stored, TENSORS: bytes(raw)}), digest)


def test_an_adapter_that_was_stored_with_its_patterns_loads() -> None:
    blob, digest = _store_as_before(
        target_modules=r"^(?!.*head).*(q|down)_proj", alpha_pattern={"layers.0.*": 5}
    )
    _, scales = _pour(blob, digest)
    assert [scale for scale in scales.tolist() if scale] == [2.5, 2.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?(7)a)", "Python cannot compile a pattern: invalid group reference"),
        pytest.param(
            "(.*.*.*.*.*.*.*.*.*.*)*(x+x+)+y",
            "matching takes more than 2 s of CPU time",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["invalid", "unbounded time"],
)
def test_a_stored_pattern_that_cannot_be_matched_fails_only_its_load(pattern: str, reason: str) -> None:
    blob, digest = _store_as_before(alpha_pattern={pattern: 5})
    with pytest.raises(AdapterCorrupt, match=f"alpha_pattern: {reason}"):
        _pour(blob, digest)
