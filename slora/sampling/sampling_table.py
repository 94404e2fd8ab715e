"""The sampling table: the sampling parameters of every running sequence, one row each.

A row is written when its sequence is admitted; steps only gather rows. One 64-bit matrix holds all numbers of a row:
integers as they are, floats as their float64 bits. So a step selects its rows with one index and uploads them in one
copy.

Two further tables exist for rows that need them: token edits (biases and barred stop tokens), and the count of each
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
from slora_kernels.draws import NO_TOP_K, Draws

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALWAYS = 2**62


class Column(IntEnum):
    """The index of each number within a row."""

    WANTS = 0
    SEED = auto()
    POSITION = auto()  # number of tokens so far = position of the next token
    TOP_K = auto()  # greater than any vocabulary size if off
    NUM_LOGPROBS = auto()
    NUM_PROPOSED = auto()  # continuations that a beam proposes
    TEMPERATURE = auto()  # 1 in greedy rows
    TOP_P = auto()
    MIN_P = auto()
    REPETITION = auto()
    PRESENCE = auto()
    FREQUENCY = auto()


class Want(IntFlag):
    """What a row needs beyond the argmax token."""

    DRAW = auto()
    PENALTIES = auto()
    EDITS = auto()
    LOGPROBS = auto()
    SEARCH = auto()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of one step. Indexes refer to positions in the batch, 0 to B - 1.

    rows: int64 [B], rows of the sampling table.
    wants: int64 [B], `Want` flags.
    is_plain: True if no row has a `Want` flag.
    ints: int64 [B, columns] on the host; empty if is_plain.
    numbers: a copy of `ints` on the device.
    """

    rows: npt.NDArray[np.int64]
    wants: npt.NDArray[np.int64]
    is_plain: bool
    ints: npt.NDArray[np.int64]
    numbers: Tensor

    @property
    def num_proposed(self) -> npt.NDArray[np.int64]:
        return self.ints[:, Column.NUM_PROPOSED]

    def wanting(self, want: Want) -> npt.NDArray[np.int64] | None:
        """int64 indexes of the rows that have the flag; None if no row has it."""
        if self.is_plain:
            return None
        found = np.flatnonzero(self.wants & want)
        return found if len(found) else None

    def whole(self, column: Column, index: Tensor) -> Tensor:
        """An integer column: int64 [len(index), 1]."""
        return self.numbers[index, column].unsqueeze(1)

    def fraction(self, column: Column, index: Tensor) -> Tensor:
        """A float column: float32 [len(index), 1]."""
        return self.numbers[index, column].view(torch.float64).float().unsqueeze(1)

    def draws(self, device: torch.device) -> Draws | None:
        """The parameters of the rows that sample; None if all rows are greedy."""
        drawing = self.wanting(Want.DRAW)
        if drawing is None:
            return None
        ints = self.ints[drawing]
        whole = np.stack((drawing, _hash_keys(ints), ints[:, Column.TOP_K]))
        fractions = ints.view(np.float64)[:, (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P)].T
        return Draws.upload(whole, fractions, device)


class SamplingTable:
    """Rows 0 to num_rows - 1, on the host.

    The token counts (`seen`) are allocated on `device` when the first row needs them.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._ints = np.zeros((num_rows, len(Column)), np.int64)
        self._floats = self._ints.view(np.float64)
        self._wants, self._positions = self._ints[:, Column.WANTS], self._ints[:, Column.POSITION]
        self._edits = _TokenEdits(num_rows)
        self._no_numbers = torch.empty((0, len(Column)), dtype=torch.int64, device=device)
        # int32 [num_rows, vocab_size]: 2 * count of the token in the answer, plus 1 if the prompt has the token.
        self._seen: Tensor | None = None
        self._wide = torch.empty(0, vocab_size)

    def widen(self, logits: Tensor) -> Tensor:
        """Logits [B, vocab_size] as float32.

        On a CPU the result is in a buffer that the next call overwrites. Having the system zero new megabytes in each
        step would take longer than filling them.
        """
        if logits.device.type != "cpu" or logits.dtype == torch.float32:
            return logits.float()
        if len(self._wide) < len(logits):
            self._wide = torch.empty(len(logits), self.vocab_size)
        return self._wide[: len(logits)].copy_(logits)

    def write(self, row: int, sequence: Sequence) -> None:
        """Writes the row of a sequence that is admitted, for the first time or again with the tokens it has
        generated.
        """
        params = sequence.request.sampling
        drawn = params.temperature > 0
        penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else NO_TOP_K
        wants = Want.DRAW if drawn else Want(0)
        wants |= Want.PENALTIES if penalised else 0
        wants |= Want.LOGPROBS if params.logprobs is not None else 0
        wants |= Want.SEARCH if params.use_beam_search else 0
        ints, floats = self._ints[row], self._floats[row]
        ints[Column.WANTS] = wants
        ints[Column.SEED] = np.uint64(sequence.seed % 2**64).astype(np.int64)
        ints[Column.POSITION] = len(sequence.token_ids)
        ints[Column.TOP_K] = top_k
        ints[Column.NUM_LOGPROBS] = params.logprobs or 0
        # At most len(stop_ids) of the proposals can end the beam, so at least `width` of them do not.
        ints[Column.NUM_PROPOSED] = min(params.width + len(sequence.stop_ids), self.vocab_size)
        floats[Column.TEMPERATURE] = params.temperature if drawn else 1.0
        floats[Column.TOP_P] = params.top_p
        floats[Column.MIN_P] = params.min_p
        floats[Column.REPETITION] = params.repetition_penalty
        floats[Column.PRESENCE] = params.presence_penalty
        floats[Column.FREQUENCY] = params.frequency_penalty
        self._edits.write(row, sequence, self.vocab_size)
        if penalised:
            self._write_seen(row, sequence)

    def gather(self, rows: list[int]) -> SamplingRows:
        index = np.array(rows, np.int64)
        wants = self._wants[index]
        if self._edits.has_any:
            is_edited = self._positions[index] < self._edits.until[index]
            wants |= np.where(is_edited, Want.EDITS, 0)
        if not wants.any():  # the common case: saves one index and one upload
            return SamplingRows(index, wants, True, self._ints[:0], self._no_numbers)
        ints = self._ints[index]
        return SamplingRows(index, wants, False, ints, torch.from_numpy(ints).to(self.device))

    def edits(self, rows: SamplingRows, index: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The token edits of rows `index`: token ids int64 and the values to add to their logits float32, both
        [len(index), E]. Unused entries add 0.
        """
        slots = rows.rows[index]
        tokens, values = self._edits.gather(slots, self._positions[slots])
        return torch.from_numpy(tokens).to(self.device), torch.from_numpy(values).to(self.device)

    def seen(self, rows: SamplingRows, index: npt.NDArray[np.int64]) -> Tensor:
        """int32 [len(index), vocab_size]: the token counts of rows that have penalties."""
        assert self._seen is not None, "a row that wants penalties was written, so there are counts"
        return self._seen[torch.from_numpy(rows.rows[index]).to(self.device)]

    def advance(self, rows: SamplingRows, tokens: Tensor) -> None:
        """Moves every row to its next position, and counts its new token if the row has penalties.

        tokens: int64 [B].
        """
        self._positions[rows.rows] += 1
        index = rows.wanting(Want.PENALTIES)
        if index is not None and self._seen is not None:
            slots, which = (torch.from_numpy(part).to(self.device) for part in (rows.rows[index], index))
            self._seen[slots, tokens[which]] += 2

    def _write_seen(self, row: int, sequence: Sequence) -> None:
        if self._seen is None:
            self._seen = torch.zeros(
                (len(self._ints), self.vocab_size), dtype=torch.int32, device=self.device
            )
        tokens = np.array(sequence.token_ids, np.int64)
        counts = 2 * np.bincount(tokens[sequence.num_prompt :], minlength=self.vocab_size)
        counts[tokens[: sequence.num_prompt]] |= 1
        self._seen[row] = torch.from_numpy(counts.astype(np.int32))


class _TokenEdits:
    """By row, the tokens whose logits are edited.

    Biases apply at all positions. Stop tokens are barred (minus infinity) before a given position.
    """

    def __init__(self, num_rows: int) -> None:
        self.until = np.zeros(num_rows, np.int64)  # position from which no edit of the row applies
        self.has_any = False  # also True if only former rows had edits
        self._num = np.zeros(num_rows, np.int64)
        self._tokens = np.zeros((num_rows, 0), np.int64)
        self._values = np.zeros((num_rows, 0), np.float32)
        self._untils = np.zeros((num_rows, 0), np.int64)

    def write(self, row: int, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.request.sampling
        barred_until = sequence.num_prompt + params.min_tokens
        # Larger ids are not in the vocabulary, so they cannot be sampled.
        barred = [t for t in sorted(sequence.stop_ids) if t < vocab_size] if params.min_tokens else []
        num = len(params.logit_bias) + len(barred)
        self._num[row] = num
        self.until[row] = _ALWAYS if params.logit_bias else barred_until if barred else 0
        if num == 0:
            return
        self.has_any = True
        self._widen(num)
        self._tokens[row, :num] = [*params.logit_bias, *barred]
        self._values[row, :num] = [*params.logit_bias.values(), *(-np.inf for _ in barred)]
        self._untils[row, :num] = [_ALWAYS] * len(params.logit_bias) + [barred_until] * len(barred)

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
        """Widens the tables to the next power of two, so this happens at most a dozen times in a server's life."""
        old = self._tokens.shape[1]
        if width > old:
            more = ((0, 0), (0, (1 << (width - 1).bit_length()) - old))
            self._tokens = np.pad(self._tokens, more)
            self._values = np.pad(self._values, more)
            self._untils = np.pad(self._untils, more)


def _hash_keys(ints: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A key for each row, computed from its seed and position only, so it is the same in any batch and at any time."""
    seeds, positions = (ints[:, column].astype(np.uint64) for column in (Column.SEED, Column.POSITION))
    keys = _mix(seeds * _GOLDEN + (positions + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return keys.view(np.int64)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al., 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
