"""Reads an adapter from a blob of a store: first its config and header, then its tensors in batches.

Tensors are read in the order in which the digest hashes them. Files in stores have the same order (`adapter.py`), so
they are read sequentially. Two threads take turns: each reads a batch of rows, hashes it and packs it, while it is in
the core's own cache. Only one of them reads and only one of them hashes at a time. So a load takes half of the CPU
time of the three stages, or as long as the slowest one, and holds only two batches in memory.

The upload's checks have already scanned the weights, and the same digest means the same weights. So only checks whose
result depends on this server are repeated. Shapes, ranks and scales are checked from the header. Overflow of the served
dtype is checked during conversion.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import AdapterCorrupt, AdapterInvalid, Reason
from slora_adapters.peft.adapter import (
    DIGEST_VERSION,
    DIGEST_VERSIONS,
    TENSORS_NAME,
    AdapterHash,
    AdapterLimits,
    AdapterTensors,
)
from slora_adapters.peft.packing import ByteArray, Packer, PackingPlan, PlannedPieces, TensorPiece
from slora_adapters.peft.peft_config import (
    CONFIG_NAME,
    DIGEST_FIELD,
    MAX_CONFIG_BYTES,
    PeftConfig,
    parse_peft_config,
)
from slora_adapters.peft.targeting import resolve_targets
from slora_adapters.peft.tensor_file import DTYPES, PREFIX_BYTES, TensorSpan, measure_header, parse_spans
from slora_adapters.peft.validation import validate
from slora_adapters.store.store import Blob
from slora_kernels.layout import AdapterLayout, ModelShape
from slora_kernels.partition import Partition

# With this size, a batch stays in a core's own cache from reading to packing, with the memory that it is packed into.
# With 1 MiB, a load took 5 to 15% more CPU time (2 MiB of L2 cache), with 256 KiB as much.
BATCH_BYTES = 1 << 19
# One for each thread. Hashing takes almost half of the CPU time, so a third thread would mostly wait.
NUM_BUFFERS = 2


def make_buffers(batch_bytes: int = BATCH_BYTES) -> list[bytearray]:
    """Returns the buffers that `StoredAdapter.pour` needs to read batches of this size."""
    return [bytearray(batch_bytes) for _ in range(NUM_BUFFERS)]


class StoredAdapter:
    """An adapter in a blob. `pour` raises an error unless the adapter has the given digest.

    The constructor reads config and header, and raises AdapterCorrupt if they are not valid on this server.
    Errors from reading the blob are propagated.
    """

    def __init__(
        self, blob: Blob, digest: str, shape: ModelShape, limits: AdapterLimits, num_ranks: int = 1
    ) -> None:
        self._blob = blob
        self._digest = digest
        try:
            config = bytes(_read(blob, CONFIG_NAME, 0, _size(blob, CONFIG_NAME, MAX_CONFIG_BYTES)))
            self._body_start, header, body_bytes = _read_header(blob, limits)
            parse = _parse_known if len(config) + len(header) <= _KNOWN_BYTES else _parse
            self._parsed = parse(config, header, body_bytes, Partition(shape, num_ranks), limits)
        except ValueError as error:
            raise AdapterCorrupt(f"stored adapter {digest[:12]} cannot be served here: {error}") from error
        self.layout: AdapterLayout = self._parsed.layout

    def pour(
        self,
        region: ByteArray,
        dtype: str,
        buffers: list[bytearray],
        on_read: Callable[[], None] = lambda: None,
    ) -> npt.NDArray[np.float32]:
        """Packs the tensors into `region`, uint8 [num_ranks * layout.num_bytes], for the served dtype.

        Returns the scales.

        The content of `region` is undefined until this method returns. buffers: from `make_buffers`, with any content,
        and used only during the call. on_read: called after each batch that was read.

        Raises AdapterCorrupt if the digest differs or a value overflows, and what reading the blob raises. After an
        error, no thread writes to `region` any more.
        """

        def read(start: int, content: memoryview) -> None:
            self._blob.read_into(TENSORS_NAME, self._body_start + start, content)
            on_read()

        found = []
        plan, batches = self._parsed.plan(dtype, len(buffers[0]))
        # The stored config says which hash made the digest. It is not trusted, so the load tries the other one, too.
        for version in self._parsed.digest_versions:
            digest = AdapterHash(self._parsed.config, version)
            pouring = _Pouring(read, batches, digest, self._parsed.lines, plan, region)
            try:
                pouring.run(buffers)
            except AdapterInvalid as error:
                raise AdapterCorrupt(
                    f"stored adapter {self._digest[:12]} cannot be served here: {error}"
                ) from error
            found.append(digest.hexdigest())
            if found[-1] == self._digest:
                return pouring.scales
        raise AdapterCorrupt(
            f"the bytes of stored adapter {self._digest[:12]} have the digest {found[0][:12]} instead"
        )


@dataclass(slots=True)
class _Batch:
    """Rows that are adjacent in the body of the file, starting at byte `start`, of tensors of one dtype."""

    start: int
    pieces: list[TensorPiece]
    # Made when a load first needs it.
    planned: PlannedPieces | None = None

    @property
    def dtype(self) -> "np.dtype[Any]":
        return DTYPES[self.pieces[0].tensor.dtype]

    @property
    def num_bytes(self) -> int:
        last = self.pieces[-1]
        return (last.start + last.num_rows * last.row_elements) * self.dtype.itemsize


def _list_batches(spans: Mapping[str, TensorSpan], batch_bytes: int) -> list[_Batch]:
    """Returns all rows in the order of their tensors' names. A row longer than a batch has its own batch."""
    batches: list[_Batch] = []
    end, num_left = -1, 0  # where the last batch ends, and the bytes that it may still hold
    for name in sorted(spans):
        tensor = spans[name]
        row_bytes, first_row = tensor.num_bytes // tensor.shape[0], 0
        while first_row < tensor.shape[0]:
            start = tensor.start + first_row * row_bytes
            continues = start == end and batches[-1].pieces[0].tensor.dtype == tensor.dtype
            if not continues or num_left < row_bytes:
                batches.append(_Batch(start, []))
                num_left = batch_bytes
            count = min(max(1, num_left // row_bytes), tensor.shape[0] - first_row)
            place = (start - batches[-1].start) // DTYPES[tensor.dtype].itemsize
            batches[-1].pieces.append(TensorPiece(tensor, first_row, count, place))
            first_row += count
            num_left -= count * row_bytes
            end = start + count * row_bytes
    return batches


class _Pouring:
    """Reads, hashes and packs the batches of a blob, each on one of several threads.

    read: reads the bytes of the body from a place on.
    lines: for each tensor, the line that is hashed before its bytes.
    """

    def __init__(
        self,
        read: Callable[[int, memoryview], None],
        batches: Iterable[_Batch],
        digest: AdapterHash,
        lines: Mapping[str, bytes],
        plan: PackingPlan,
        region: ByteArray,
    ) -> None:
        self._read = read
        self._batches = iter(batches)
        self._digest = digest
        self._lines = lines
        self._plan = plan
        self._packer = Packer(plan, region)
        # A thread that has read a batch holds the first lock until it has the second one. So batches are hashed in the
        # order in which they were read.
        self._reading, self._hashing = Lock(), Lock()

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        return self._packer.scales

    def run(self, buffers: list[bytearray]) -> None:
        """Uses one thread for each buffer, of which this one is the first. Raises AdapterInvalid if a value overflows,
        and what reading the blob raises. When this method returns or raises, the other threads have ended.
        """
        with ThreadPoolExecutor(len(buffers), "adapter-pour") as threads:
            others = [threads.submit(self._pour_batches, buffer) for buffer in buffers[1:]]
            self._pour_batches(buffers[0])
            for other in others:
                other.result()

    def _pour_batches(self, buffer: bytearray) -> None:
        while (found := self._read_next(buffer)) is not None:
            try:
                try:
                    self._hash(*found)
                finally:
                    self._hashing.release()
                self._pack(*found)
            except BaseException:
                with self._reading:
                    self._batches = iter(())  # so that the other threads end, too
                raise

    def _read_next(self, buffer: bytearray) -> tuple[_Batch, memoryview] | None:
        """Reads the next batch, and acquires the lock of hashing for it. Returns None if there is none."""
        with self._reading:
            try:
                batch = next(self._batches, None)
                if batch is None:
                    return None
                if len(buffer) < batch.num_bytes:
                    buffer = bytearray(batch.num_bytes)  # the batch is a row that is longer
                content = memoryview(buffer)[: batch.num_bytes]
                self._read(batch.start, content)
            except BaseException:
                self._batches = iter(())
                raise
            self._hashing.acquire()
            return batch, content

    def _hash(self, batch: _Batch, content: memoryview) -> None:
        pieces: list[bytes | memoryview] = []
        size, end = batch.dtype.itemsize, 0
        for piece in batch.pieces:
            if piece.first_row == 0:
                pieces.append(self._lines[piece.tensor.name])
            start, end = end, end + piece.num_rows * piece.row_elements * size
            pieces.append(content[start:end])
        self._digest.update(*pieces)

    def _pack(self, batch: _Batch, content: memoryview) -> None:
        if batch.planned is None:
            batch.planned = self._plan.plan_pieces(batch.pieces)
        self._packer.write(batch.planned, np.frombuffer(content, batch.dtype))


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What the config and the header of a blob describe. Several loads may share it, also at the same time."""

    config: PeftConfig
    spans: Mapping[str, TensorSpan]  # by name, in the order of their bytes
    lines: Mapping[str, bytes]  # for each tensor, the line that is hashed before its bytes
    tensors: AdapterTensors[TensorSpan]
    partition: Partition
    layout: AdapterLayout  # of each rank's part
    digest_versions: tuple[int, ...]  # in the order in which they are tried
    plans: dict[tuple[str, int], tuple[PackingPlan, list[_Batch]]] = field(default_factory=dict)

    def plan(self, dtype: str, batch_bytes: int) -> tuple[PackingPlan, list[_Batch]]:
        """Plans a load: its batches, and where their rows go. Later loads use the same plan."""
        found = self.plans.get((dtype, batch_bytes))
        if found is None:
            packing = PackingPlan(self.tensors, self.partition, dtype, self.layout)
            found = packing, _list_batches(self.spans, batch_bytes)
            if len(found[1]) <= _NUM_KEPT_BATCHES:
                self.plans[dtype, batch_bytes] = found
        return found


def _parse(
    config_json: bytes, header: bytes, body_bytes: int, partition: Partition, limits: AdapterLimits
) -> _Parsed:
    """Parses and checks the config and the header of a blob. Raises ValueError if this server cannot serve them."""
    config, reasons = parse_peft_config(config_json)
    if config is None or reasons:
        raise ValueError(_describe(reasons))
    spans = parse_spans(header, body_bytes)
    targets, reasons = resolve_targets(config, partition.shape)
    tensors, pair_reasons = validate(config, targets, spans, partition.shape, limits)
    reasons += pair_reasons
    if not reasons and {tensor.name for tensor in tensors.list_all()} != spans.keys():
        reasons.append(Reason("unknown_tensor", "it has tensors that no part of it uses"))
    if reasons:
        raise ValueError(_describe(reasons))
    lines = {name: AdapterHash.describe(span) for name, span in spans.items()}
    is_new = json.loads(config_json).get(DIGEST_FIELD) == DIGEST_VERSION
    versions = DIGEST_VERSIONS if is_new else DIGEST_VERSIONS[::-1]
    return _Parsed(config, spans, lines, tensors, partition, tensors.lay_out(partition.rank_shape), versions)


# Most adapters of a server come from a few training recipes, so their configs and headers are equal byte for byte. For
# an adapter with 98 pairs, parsing and checking takes 12 ms, which is longer than reading and hashing 10 MB.
_NUM_KNOWN = 16
# Parsed, they take up to ten times their size in memory. Larger ones are not kept.
_KNOWN_BYTES = 256 << 10
# The plan of a batch takes about 2 KB. Plans of more batches are not kept, because making one takes little of so long a
# load.
_NUM_KEPT_BATCHES = 1024
_parse_known = lru_cache(_NUM_KNOWN)(_parse)


def _read_header(blob: Blob, limits: AdapterLimits) -> tuple[int, bytes, int]:
    """Returns the offset of the body, the header, and the size of the body. Raises ValueError if the header is too
    large.
    """
    file_bytes = _size(blob, TENSORS_NAME, limits.max_tensor_bytes)
    prefix = _read(blob, TENSORS_NAME, 0, min(PREFIX_BYTES, file_bytes))
    header_bytes = measure_header(prefix, file_bytes)
    body_start = PREFIX_BYTES + header_bytes
    header = bytes(_read(blob, TENSORS_NAME, PREFIX_BYTES, header_bytes))
    return body_start, header, file_bytes - body_start


def _size(blob: Blob, name: str, max_bytes: int) -> int:
    """Returns the size of a member. Raises ValueError if the member does not exist or is too large."""
    if name not in blob.members:
        raise ValueError(f"{name} is missing")
    if blob.members[name] > max_bytes:
        raise ValueError(
            f"{name} is {blob.members[name]} bytes long; this server accepts at most {max_bytes}"
        )
    return blob.members[name]


def _read(blob: Blob, name: str, start: int, num_bytes: int) -> memoryview:
    content = memoryview(bytearray(num_bytes))
    blob.read_into(name, start, content)
    return content


def _describe(reasons: list[Reason]) -> str:
    shown = "; ".join(reason.message for reason in reasons[:3])
    return shown if len(reasons) <= 3 else f"{shown}; and {len(reasons) - 3} more reasons"
