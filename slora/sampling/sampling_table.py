"""The sampling table: the sampling parameters of every running sequence, one row each.

A row is written when its sequence is admitted; steps only gather rows. One 64-bit matrix holds all numbers of a row:
integers as they are, floats as their float64 bits. So a step selects its rows with one index and uploads them in one
copy.

Two further tables exist for rows that need them: logit biases (including banned stop tokens), and the count of each
vocabulary token so far.

The scheduler assigns and frees rows. A new sequence in a row overwrites the whole row.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora.scheduler.sequence import Sequence
from slora_kernels.host_copies import upload
from slora_kernels.layout import MAX_ADDED_ROWS
from slora_kernels.sampling_tensors import NO_TOP_K, SamplingTensors

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALWAYS = 2**62
# The smallest top_p that kernels take. A smaller one, such as 0, keeps the same tokens: those of the greatest weight.
_MIN_TOP_P = 2.0**-100


class Column(IntEnum):
    """The index of each number within a row."""

    FEATURES = 0
    SEED = auto()
    # The position of the token to sample. It changes with each token, so it is set when rows are gathered.
    POSITION = auto()
    TOP_K = auto()  # Without top_k, the value is greater than any vocabulary size.
    NUM_LOGPROBS = auto()
    # The number of continuations that a beam proposes.
    NUM_PROPOSED = auto()
    TEMPERATURE = auto()  # The value is 1 in greedy rows.
    TOP_P = auto()
    MIN_P = auto()
    REPETITION = auto()
    PRESENCE = auto()
    FREQUENCY = auto()


class SamplingFeature(IntFlag):
    """The operations that a row needs besides the argmax."""

    SAMPLE = auto()
    PENALTIES = auto()
    LOGIT_BIAS = auto()
    LOGPROBS = auto()
    BEAM_SEARCH = auto()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of one step. Indexes refer to positions in the batch, 0 to B - 1.

    rows: int64 [B], rows of the sampling table.
    features: int64 [B], `SamplingFeature` flags.
    is_plain: True if no row has a `SamplingFeature` flag.
    ints: int64 [B, columns] on the host; empty if is_plain.
    numbers: a copy of `ints` on the device.
    """

    rows: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]
    is_plain: bool
    ints: npt.NDArray[np.int64]
    numbers: Tensor

    @property
    def num_proposed(self) -> npt.NDArray[np.int64]:
        return self.ints[:, Column.NUM_PROPOSED]

    def rows_with(self, feature: SamplingFeature) -> npt.NDArray[np.int64] | None:
        """int64 indexes of the rows that have the flag; None if no row has it."""
        if self.is_plain:
            return None
        found = np.flatnonzero(self.features & feature)
        return found if len(found) else None

    def float_column(self, column: Column, index: Tensor) -> Tensor:
        """Returns a float column of rows `index`: float32 [len(index), 1]."""
        return self.numbers[index, column].view(torch.float64).float().unsqueeze(1)

    def sampling_tensors(self, device: torch.device) -> SamplingTensors | None:
        """Returns the parameters of the rows that sample; None if all rows are greedy."""
        sampled = self.rows_with(SamplingFeature.SAMPLE)
        if sampled is None:
            return None
        ints = self.ints[sampled]
        int_columns = np.stack((sampled, _hash_keys(ints), ints[:, Column.TOP_K]))
        float_columns = ints.view(np.float64)[:, (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P)].T
        return SamplingTensors.upload(int_columns, float_columns, device)


class SamplingTable:
    """The sampling table: rows 0 to num_rows - 1, on the host.

    The token counts (`token_counts`) are allocated on `device` when the first row needs them.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._ints = np.zeros((num_rows, len(Column)), np.int64)
        self._floats = self._ints.view(np.float64)
        self._features = self._ints[:, Column.FEATURES]
        self._biases = _LogitBiases(num_rows)
        self._no_numbers = torch.empty((0, len(Column)), dtype=torch.int64, device=device)
        # int32 [num_rows, all ids]: 2 * count of the token in the answer, plus 1 if the prompt has the token. The ids
        # of added tokens follow those of the base model.
        self._token_counts: Tensor | None = None
        self._wide = torch.empty(0, vocab_size)

    def widen(self, logits: Tensor) -> Tensor:
        """Returns logits [B, V] as float32.

        On a CPU, the result is in a buffer that the next call overwrites. A new buffer in each step would be slower,
        because the operating system clears new memory.
        """
        is_plain = logits.shape[1] == self.vocab_size
        if not is_plain or logits.device.type != "cpu" or logits.dtype == torch.float32:
            return logits.float()
        if len(self._wide) < len(logits):
            self._wide = torch.empty(len(logits), self.vocab_size)
        return self._wide[: len(logits)].copy_(logits)

    def write(self, row: int, sequence: Sequence) -> None:
        """Writes the row of an admitted sequence. Counts the tokens that the sequence has already generated."""
        params = sequence.request.sampling
        is_sampled = params.temperature > 0
        penalised = params.has_penalties
        vocab_size = self.vocab_size + sequence.num_added
        top_k = params.top_k if 0 < params.top_k < vocab_size else NO_TOP_K
        features = SamplingFeature.SAMPLE if is_sampled else SamplingFeature(0)
        features |= SamplingFeature.PENALTIES if penalised else 0
        features |= SamplingFeature.LOGPROBS if params.logprobs is not None else 0
        features |= SamplingFeature.BEAM_SEARCH if params.use_beam_search else 0
        ints, floats = self._ints[row], self._floats[row]
        ints[Column.FEATURES] = features
        ints[Column.SEED] = np.uint64(sequence.seed % 2**64).astype(np.int64)
        ints[Column.TOP_K] = top_k
        ints[Column.NUM_LOGPROBS] = params.logprobs or 0
        # At most len(stop_ids) of the proposals can end the beam, so at least `width` of them do not.
        ints[Column.NUM_PROPOSED] = min(params.width + len(sequence.stop_ids), vocab_size)
        floats[Column.TEMPERATURE] = params.temperature if is_sampled else 1.0
        floats[Column.TOP_P] = max(params.top_p, _MIN_TOP_P)
        floats[Column.MIN_P] = params.min_p
        floats[Column.REPETITION] = params.repetition_penalty
        floats[Column.PRESENCE] = params.presence_penalty
        floats[Column.FREQUENCY] = params.frequency_penalty
        self._biases.write(row, sequence, vocab_size)
        if penalised:
            self._write_token_counts(row, sequence)

    def gather(self, sequences: list[Sequence]) -> SamplingRows:
        """Returns the rows of the sequences. A sequence with drafts is listed once for each position to sample."""
        index = np.array([sequence.row for sequence in sequences], np.int64)
        features = self._features[index]
        if not (self._biases.has_any or features.any()):  # The common case: no numbers to upload.
            return SamplingRows(index, features, True, self._ints[:0], self._no_numbers)
        positions = _find_positions(sequences)
        is_biased = positions < self._biases.until[index]
        features |= np.where(is_biased, SamplingFeature.LOGIT_BIAS, 0)
        if not features.any():
            return SamplingRows(index, features, True, self._ints[:0], self._no_numbers)
        ints = self._ints[index]
        ints[:, Column.POSITION] = positions
        return SamplingRows(index, features, False, ints, upload(ints, self.device))

    def logit_biases(self, rows: SamplingRows, index: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The logit biases of rows `index`: token ids int64 and the values to add to their logits float32, both
        [len(index), E]. Unused entries add 0.
        """
        slots = rows.rows[index]
        tokens, values = self._biases.gather(slots, rows.ints[index, Column.POSITION])
        return upload(tokens, self.device), upload(values, self.device)

    def token_counts(self, rows: SamplingRows, index: npt.NDArray[np.int64], width: int) -> Tensor:
        """int32 [len(index), width]: the counts of the first tokens, in rows that have penalties."""
        assert self._token_counts is not None, "a row with penalties was written, so there are counts"
        return self._token_counts[upload(rows.rows[index], self.device), :width]

    def advance(self, rows: SamplingRows, tokens: Tensor) -> None:
        """Counts the new token of each row that has penalties. No sequence with penalties has drafts.

        tokens: int64 [B].
        """
        index = rows.rows_with(SamplingFeature.PENALTIES)
        if index is not None and self._token_counts is not None:
            slots, which = (upload(part, self.device) for part in (rows.rows[index], index))
            self._token_counts[slots, tokens[which]] += 2

    def _write_token_counts(self, row: int, sequence: Sequence) -> None:
        num_ids = self.vocab_size + MAX_ADDED_ROWS
        if self._token_counts is None:
            self._token_counts = torch.zeros(
                (len(self._ints), num_ids), dtype=torch.int32, device=self.device
            )
        tokens = np.array(sequence.token_ids, np.int64)
        counts = 2 * np.bincount(tokens[sequence.num_prompt :], minlength=num_ids)
        counts[tokens[: sequence.num_prompt]] |= 1
        self._token_counts[row] = upload(counts.astype(np.int32), self.device)


class _LogitBiases:
    """For each row, the tokens whose logits get a bias.

    The biases of `logit_bias` apply at all positions. Stop tokens have a bias of minus infinity before the position at
    which `min_tokens` is reached.
    """

    def __init__(self, num_rows: int) -> None:
        # The first position at which none of the row's biases applies.
        self.until = np.zeros(num_rows, np.int64)
        self.has_any = False  # Whether any row has ever had a bias.
        self._num = np.zeros(num_rows, np.int64)
        self._tokens = np.zeros((num_rows, 0), np.int64)
        self._values = np.zeros((num_rows, 0), np.float32)
        self._untils = np.zeros((num_rows, 0), np.int64)

    def write(self, row: int, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.request.sampling
        banned_until = sequence.num_prompt + params.min_tokens
        # Larger ids are not in the vocabulary, so they cannot be sampled.
        banned = [t for t in sorted(sequence.stop_ids) if t < vocab_size] if params.min_tokens else []
        num = len(params.logit_bias) + len(banned)
        self._num[row] = num
        self.until[row] = _ALWAYS if params.logit_bias else banned_until if banned else 0
        if num == 0:
            return
        self.has_any = True
        self._widen(num)
        self._tokens[row, :num] = [*params.logit_bias, *banned]
        self._values[row, :num] = [*params.logit_bias.values(), *(-np.inf for _ in banned)]
        self._untils[row, :num] = [_ALWAYS] * len(params.logit_bias) + [banned_until] * len(banned)

    def gather(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        nums = self._num[rows]
        width = int(nums.max())
        used = np.arange(width) < nums[:, None]
        counts = used & (positions[:, None] < self._untils[rows, :width])
        tokens = np.where(used, self._tokens[rows, :width], 0)
        return tokens, np.where(counts, self._values[rows, :width], np.float32(0))

    def _widen(self, width: int) -> None:
        """Widens the tables to the next power of two. This happens at most a dozen times in a server's life."""
        old = self._tokens.shape[1]
        if width > old:
            more = ((0, 0), (0, (1 << (width - 1).bit_length()) - old))
            self._tokens = np.pad(self._tokens, more)
            self._values = np.pad(self._values, more)
            self._untils = np.pad(self._untils, more)


def _find_positions(sequences: list[Sequence]) -> npt.NDArray[np.int64]:
    """Returns the position of the token to sample for each row. The rows of one sequence are consecutive, and so are
    their positions.
    """
    positions: list[int] = []
    last: Sequence | None = None
    for sequence in sequences:
        position = len(sequence.token_ids) + sequence.num_pending
        positions.append(positions[-1] + 1 if sequence is last else position)
        last = sequence
    return np.array(positions, np.int64)


def _hash_keys(ints: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns a key for each row. It depends only on the row's seed and position, so it is the same in any batch."""
    seeds, positions = (ints[:, column].astype(np.uint64) for column in (Column.SEED, Column.POSITION))
    keys = _mix(seeds * _GOLDEN + (positions + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return keys.view(np.int64)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al., 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
