"""What one step may compute and load: prompt tokens and decode rows of each tenant, background work, adapter pages.

A step ends for all its sequences at the same time. So a long prefill of one tenant delays the next token of every other
tenant. A prompt that gets no tokens in a step waits for the next step. These rules limit both delays:

- Beside decode rows of other tenants, the prefills of a step take at most `short_prefill_s`. If more
  tenants wait for a first token (W) than decode (D), the limit grows by W / D, because delaying few then helps many.
- While another tenant also has a prompt to compute, a tenant takes at most half of the tokens that are left. Equal
  parts would be fairer, but every prompt would then complete as late as the last one. It also takes at most
  `short_prefill_s`, or as many tokens as the other tenant has to compute if these take longer.

A tenant that is alone in the engine may use the whole step.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from itertools import groupby
from operator import attrgetter, itemgetter
from types import MappingProxyType

from slora.core.cost_model import CostModel, StepWork
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk

# The prefills of a step may take this many times the step's fixed cost. With 2, a flood of prompts makes the steps of
# other tenants at most three times as long. The flood reaches two thirds of the throughput that it would have alone.
# With 4, the steps would be up to five times as long, and the flood would reach four fifths. Ordinary workloads
# complete as many requests with 4 as with 2 (bench.simulate).
_STEP_COSTS = 2
# The prefills of a step may always take as long as this many tokens without context, even if its fixed cost is tiny.
_MIN_TOKENS = 32
# Prefills may always take this long, because a reader does not notice it. A decode step on a GPU takes 5 to 10 ms.
# Without this rule, S-LoRA's load with five adapters filled only 75 of 256 places on an H200.
_UNNOTICED_S = 0.01
# The most that waiting tenants can lengthen the prefills of a step.
_MAX_WAITING_PER_DECODING = 8
# Sums of seconds that should be equal may differ by this much.
_ROUNDING = 1e-6
_PRIORITY = attrgetter("priority")


def short_prefill_s(costs: CostModel) -> float:
    """Returns how many seconds of prefill a step may contain if other requests may be waiting for its end."""
    return max(_STEP_COSTS * costs.step_s, costs.prefill_s(_MIN_TOKENS), _UNNOTICED_S)


def tokens_beside_others(costs: CostModel, num_waiting: int, num_decoding: int) -> int:
    """Returns how many prompt tokens without context a step may compute beside decode rows of other tenants.

    num_waiting: the tenants that could start in this step, and have no decode row. num_decoding: those that have one.
    """
    ratio = num_waiting / max(1, num_decoding)
    growth = min(max(1.0, ratio), _MAX_WAITING_PER_DECODING)
    return round(costs.tokens(growth * short_prefill_s(costs)))


class PrefillBudget:
    """The prompt tokens that one step may compute.

    All limits but `num_tokens` are times, as numbers of tokens at the start of a prompt. A token with a long context
    takes longer, because it attends to all of it: on two cores, a token at position 7,000 takes five times as long.

    costs: for tokens with context.
    num_tokens: the tokens that the step may still compute.
    num_beside_others: how many of these tokens may be prefilled beside decode rows of other tenants.
    decoding: the tenants with decode rows in the step.
    prefilling: the tenants with prompts to compute.
    wanted: how many tokens those have to compute whose prompts the step can certainly compute.
    short_tokens: the tokens that a step may always prefill beside those of others.
    """

    def __init__(
        self,
        costs: CostModel,
        num_tokens: int,
        num_beside_others: int,
        decoding: Set[TenantAccount] = frozenset(),
        prefilling: Set[TenantAccount] = frozenset(),
        wanted: Mapping[TenantAccount, int] = MappingProxyType({}),
        short_tokens: int = 0,
    ) -> None:
        self._costs = costs
        self.num_tokens = num_tokens
        # The two tenants that want the least.
        self._least_wanted = sorted(wanted.items(), key=itemgetter(1))[:2]
        self._short_tokens = short_tokens
        self._num_beside_others: float = num_beside_others
        self._decoding = decoding
        self._without_part = set(prefilling)
        self._parts: dict[TenantAccount, float] = {}

    def left(self, tenant: TenantAccount) -> int:
        """Returns how many prompt tokens the step has left for the tenant, whatever part of them it may take."""
        if self._delays(tenant):
            return min(self.num_tokens, int(self._num_beside_others + _ROUNDING))
        return self.num_tokens

    def fit(self, tenant: TenantAccount, start: int = 0) -> int:
        """Returns how many tokens of the tenant's prompt fit into the step. start: the position of the first one."""
        left = self.left(tenant)
        if tenant not in self._parts:
            self._without_part.discard(tenant)
            part = -(-left // 2) if self._without_part else math.inf
            others = [count for other, count in self._least_wanted if other is not tenant]
            self._parts[tenant] = min(part, max(self._short_tokens, others[0])) if others else part
        limit = self._parts[tenant]
        if self._delays(tenant):
            limit = min(limit, self._num_beside_others)
        if limit == math.inf or left <= 0:
            return left
        fitting = int(self._costs.fit_tokens(self._costs.prefill_s(1) * limit, start) + _ROUNDING)
        # At least one token, because a prompt with a very long context would never end otherwise.
        return min(left, max(fitting, int(limit + _ROUNDING >= 1)))

    def spend(self, tenant: TenantAccount, num_tokens: int, start: int = 0) -> None:
        """Counts tokens that fit. Called after `fit`."""
        self.num_tokens -= num_tokens
        spent = self._costs.tokens(self._costs.prefill_s(num_tokens, start))
        if self._delays(tenant):
            # A single token may take longer than the tenant's part, which must not be at the expense of other prompts.
            self._num_beside_others -= min(spent, max(0.0, self._parts[tenant]))
        self._parts[tenant] -= spent

    def _delays(self, tenant: TenantAccount) -> bool:
        return len(self._decoding) > (tenant in self._decoding)


ABSENT_STEPS = 8
# A step may always compute this many rows of a tenant. While all steps have one row, `LearnedCosts` cannot tell the
# cost of a row from that of a step. With few rows in a step, it would not learn that further rows cost little.
MIN_ROWS = 8


class RowBudget:
    """The decode rows of one step. Those above the limit are held back until the other work of the step is known.

    A row that the step does not compute keeps its place and its pages. Rows that more steps left out go first.

    Each row makes the step longer, so a tenant with many rows delays every token of the others: on two cores, 256 beams
    made a step ten times as long. If two tenants each get half of the machine, an answer takes twice as long as alone.
    So beside another tenant, the rows of a tenant take at most the fixed cost of a step, or the time of the other
    tenant's work in this step if that is more. Tenants with equally many rows do not limit each other, and a tenant
    that is alone in a step has no limit. On a GPU, all rows of a batch usually take less time than the fixed cost of a
    step.

    The next request of a tenant often comes soon after the last one. So a tenant that has just computed still counts
    for `ABSENT_STEPS` steps. Otherwise each of its requests would first wait for the end of a step with all rows of
    another tenant, which took 0.7 s with 256 rows on two cores.

    held_back: the sequences of the rows that are held back.
    """

    def __init__(self, costs: CostModel, decoding: Iterable[Sequence] = ()) -> None:
        """decoding: the sequences with decode rows, or none if only one tenant has work: no row is limited then."""
        self._costs = costs
        self._fixed_s = max(costs.step_s, _UNNOTICED_S)
        self.held_back: list[Sequence] = []
        by_tenant: defaultdict[TenantAccount, list[Sequence]] = defaultdict(list)
        for sequence in decoding:
            by_tenant[sequence.tenant].append(sequence)
        for rows in by_tenant.values():
            if len(rows) > MIN_ROWS and sum(_row_s(sequence, costs) for sequence in rows) > self._fixed_s:
                self._hold_back(rows)

    def _hold_back(self, rows: list[Sequence]) -> None:
        rows.sort(key=attrgetter("num_left_out"), reverse=True)
        left_s = self._fixed_s
        for place, sequence in enumerate(rows):
            left_s -= _row_s(sequence, self._costs)
            if place >= MIN_ROWS and left_s < 0:
                self.held_back.append(sequence)
            else:
                sequence.num_left_out = 0

    def release(self, chunks: Collection[Chunk], absent: Iterable[TenantAccount]) -> list[Sequence]:
        """Returns the sequences of `held_back` that fit into the step.

        chunks: what the step computes so far. absent: the tenants that have no work in this step and still count.

        Other tenants' work is weighed by their weights. Work of later priority classes limits no tenant.

        Worked example: a step costs 38 ms and a row 1.5 ms. Of 100 rows, a tenant computes 25 beside a tenant with 10
        rows, 40 beside a tenant with 40 rows, and all of them beside none.
        """
        row_s: defaultdict[TenantAccount, float] = defaultdict(float)
        wanted_s: defaultdict[TenantAccount, float] = defaultdict(float)
        for chunk in chunks:
            if chunk.is_decode_row:
                row_s[chunk.sequence.tenant] += _row_s(chunk.sequence, self._costs)
            else:
                wanted_s[chunk.sequence.tenant] += self._costs.prefill_s(chunk.num_tokens, chunk.start)
        planned = {chunk.sequence for chunk in chunks}
        # A sequence that was held back may have been preempted since, and even resumed.
        held_back = [
            sequence
            for sequence in self.held_back
            if sequence.is_running and sequence.num_uncomputed == 1 and sequence not in planned
        ]
        for tenant, seconds in row_s.items():
            wanted_s[tenant] += seconds
        for sequence in held_back:
            wanted_s[sequence.tenant] += _row_s(sequence, self._costs)
        for tenant in absent:
            wanted_s.setdefault(tenant, 0.0)
        limits = self._find_limits(wanted_s)
        left_s = {tenant: limit_s * (1 + _ROUNDING) - row_s[tenant] for tenant, limit_s in limits.items()}
        released = []
        for sequence in held_back:
            left_s[sequence.tenant] -= _row_s(sequence, self._costs)
            if left_s[sequence.tenant] >= 0:
                sequence.num_left_out = 0
                released.append(sequence)
            else:
                sequence.num_left_out += 1
        return released

    def _find_limits(self, wanted_s: dict[TenantAccount, float]) -> dict[TenantAccount, float]:
        """Returns how many seconds the rows of each tenant may take.

        wanted_s: the seconds of all work that each tenant has.

        A tenant's own work is among the work that limits it, because it never limits the tenant itself.
        """
        limits, least_s = {}, math.inf
        for _, group in groupby(sorted(wanted_s, key=_PRIORITY), _PRIORITY):
            tenants = list(group)
            least_s = min(least_s, *(wanted_s[tenant] / tenant.weight for tenant in tenants))
            for tenant in tenants:
                limits[tenant] = max(self._fixed_s, least_s * tenant.weight)
        return limits


MAX_GROWTH = 0.03
QUIET_STEPS = 100
_STEP_COSTS_BETWEEN, _MIN_TOKENS_BETWEEN = 0.5, 8
_MIN_TOKENS_QUIET = 64


class BackgroundBudget:
    """The remaining budget of one step for background work.

    In a step with interactive requests, background work may lengthen the step by at most `MAX_GROWTH` of its estimated
    duration. So the time between two tokens of an interactive request hardly changes. Often not even one background row
    fits, for example on a CPU, where each row takes additional time. Background requests then wait for a step without
    interactive requests.

    A step without interactive requests is also kept short, because an interactive request that arrives during the step
    must wait until the step ends. While interactive requests come and go, such a step takes about one and a half times
    as long as a step with a single row. After `QUIET_STEPS` without one, it may take as long as `short_prefill_s`
    allows, which computes more background tokens per second. The first row of such a step is computed even if it takes
    longer, for example because of its mask. Otherwise the request of this row would never end.

    num_tokens: tokens that the step may still compute.
    interactive: the interactive work of the step; None if no interactive request runs.
    num_quiet_steps: the number of steps since an interactive request ran.
    """

    def __init__(
        self,
        costs: CostModel,
        num_tokens: int,
        interactive: StepWork | None,
        num_quiet_steps: int = QUIET_STEPS,
    ) -> None:
        self._costs = costs
        self._num_tokens = num_tokens
        if interactive is not None:
            self._seconds = MAX_GROWTH * costs.step_seconds(interactive)
        elif num_quiet_steps < QUIET_STEPS:
            self._seconds = max(_STEP_COSTS_BETWEEN * costs.step_s, costs.prefill_s(_MIN_TOKENS_BETWEEN))
        else:
            self._seconds = max(short_prefill_s(costs), costs.prefill_s(_MIN_TOKENS_QUIET))
        self._must_fit = interactive is None

    def fit(self, sequence: Sequence, num_tokens: int, start: int | None = None) -> int:
        """How many of the sequence's next `num_tokens` tokens fit; 0 if none does.

        start: the position of the first one, if it is not the first one that the sequence has not computed.
        """
        num_tokens = min(num_tokens, self._num_tokens)
        if num_tokens > 0 and _decodes(sequence):
            return int(self._must_fit or _row_s(sequence, self._costs) <= self._seconds)
        # A prefill chunk can have any length. Without the 1e-6, rounding errors could lose a token: 0.03 s at 0.001 s
        # per token are 30 tokens, not 29.
        fitting = self._costs.fit_tokens(self._seconds, sequence.num_computed if start is None else start)
        return max(0, min(num_tokens, max(int(fitting + _ROUNDING), int(self._must_fit))))

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens that the step computes. Called after `fit`, before the sequence changes."""
        self._num_tokens -= num_tokens
        self._must_fit = self._must_fit and not num_tokens
        if num_tokens and _decodes(sequence):
            self._seconds -= _row_s(sequence, self._costs)
        else:
            self._seconds -= self._costs.prefill_s(num_tokens, sequence.num_computed)


def _row_s(sequence: Sequence, costs: CostModel) -> float:
    """Seconds of a decode row, including the mask for structured output."""
    return costs.row_s(len(sequence.token_ids)) + sequence.mask_s


def _decodes(sequence: Sequence) -> bool:
    """Whether the sequence computes only the KV of its last generated token, as `StepPlan.measure_work` counts rows."""
    return sequence.num_uncomputed == 1 and sequence.num_computed >= sequence.num_prompt


_MIN_SHARE, _MIN_SHARE_BESIDE = 0.1, 0.5


class LoadBudget:
    """How many adapter pages a step may load into the pool while sequences decode.

    If a step spends t seconds on loads, every decoding sequence is delayed by t. In return, the requests that wait for
    these adapters start sooner. The limit weighs the delay against this gain. With W waiting requests and D decoding
    sequences, loads may lengthen the step by the fraction (W - 1) / D of its duration.

    At least a tenth of the duration is always allowed. A single waiting request thus gets its adapter soon, and the
    delay is not noticeable. A step without decoding sequences has no limit.

    A GPU copies adapters while it computes, so loads delay a step only if they take longer. There, at least half of the
    duration is allowed.

    The budget is smaller for adapters that only background requests wait for. Their loads may lengthen the steps of
    interactive requests only as much as background computation may.

    num_pages: adapter pages that the step may still load.
    num_background_pages: how many of these may be for background requests.
    pool_pages: number of pages in the pool, the limit of a step without decoding sequences.
    fixed: the limit of a step with decoding sequences. None derives it from `costs` and the numbers of sequences.
    beside: whether the device copies adapters while it computes.
    """

    def __init__(
        self,
        costs: CostModel,
        full_page_bytes: int,
        pool_pages: int,
        fixed: int | None,
        *,
        beside: bool = False,
    ) -> None:
        self.num_pages = self.num_background_pages = 0
        self._costs = costs
        self._full_page_bytes = full_page_bytes
        self._pool_pages = pool_pages
        self._fixed = fixed
        self._min_share = _MIN_SHARE_BESIDE if beside else _MIN_SHARE
        self._is_limited = False
        self._is_shared = False

    def begin_step(self, num_decoding: int, num_waiting: int, *, is_shared: bool = False) -> None:
        """Sets the budget of the next step.

        num_decoding: running sequences that compute. num_waiting: running sequences that wait for a load.
        is_shared: whether interactive requests run. If so, both numbers count only interactive sequences.
        """
        self._is_limited = num_decoding > 0
        self.num_pages = self._limit(num_decoding, num_waiting) if self._is_limited else self._pool_pages
        self.num_background_pages = self.num_pages
        self._is_shared = is_shared
        if is_shared:
            self.num_background_pages = min(self.num_pages, self._share(num_decoding, MAX_GROWTH))

    def spend(self, num_pages: int) -> None:
        self.num_pages -= num_pages
        self.num_background_pages -= num_pages

    def add_sequence(self, *, is_background: bool) -> None:
        """Lowers the budget if needed. Called when a sequence is admitted to the step.

        The first sequence in a step without decoding sequences limits the budget. The first interactive sequence in a
        step without interactive sequences limits the part for background requests.
        """
        if not self._is_limited:
            self._is_limited = True
            self.num_pages = min(self.num_pages, self._limit(num_decoding=1, num_waiting=1))
            self.num_background_pages = min(self.num_background_pages, self.num_pages)
        if not (is_background or self._is_shared):
            self._is_shared = True
            self.num_background_pages = min(self.num_background_pages, self._share(1, MAX_GROWTH))

    def _limit(self, num_decoding: int, num_waiting: int) -> int:
        """Returns how many adapter pages one step may load; at least 1.

        Worked example: 20 sequences decode, a step takes 0.03 s and a page 0.001 s. With 1 waiting request the step
        may grow by 0.1 * 0.03 s, which is 3 pages. With 11 requests it may grow by 10 / 20 * 0.03 s: 15 pages.
        """
        if self._fixed is not None:
            return self._fixed
        return self._share(num_decoding, max(self._min_share, (num_waiting - 1) / num_decoding))

    def _share(self, num_decoding: int, share: float) -> int:
        step_s = self._costs.step_s + num_decoding * self._costs.decode_s
        page_s = self._costs.load_s(self._full_page_bytes)
        return max(1, int(share * step_s / page_s)) if page_s else 1
