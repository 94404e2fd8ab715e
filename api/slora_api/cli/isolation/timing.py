"""Checks whether the time to the first token reveals to a tenant that another tenant has already sent the same prompt.

The Kolmogorov-Smirnov test compares two samples of times, as in "Auditing Prompt Caching in Language Model APIs" (Gu et
al., ICML 2025). Each sample belongs to an arm. The arms are measured in turns, so that they see the same load:

- leak: prompts that the other tenant has sent, against fresh prompts. The times must not differ.
- null: fresh prompts against fresh prompts. If the times differ, the machine is too noisy for a verdict.
- power: prompts that the same tenant has sent, against fresh prompts. Unless the times differ, the test cannot detect a
leak.
"""

import math
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from slora_api.cli.isolation.audited_server import AuditedTenant
from slora_api.cli.isolation.finding import Finding
from slora_api.cli.isolation.prefix_cells import Prompts
from slora_api.cli.remote import check

__all__ = ["ALPHA", "compare_samples", "compare_times"]

_PROBE = "timing"
# The probability that a comparison gives a false alarm.
ALPHA = 0.001


def compare_times(
    owner: AuditedTenant,
    prober: AuditedTenant,
    base: str,
    num_samples: int,
    show_progress: Callable[[int], None],
) -> Iterator[Finding]:
    """Measures all arms and yields the findings.

    num_samples: the number of samples in each arm. base: name of the base model. show_progress: called with the number
        of rounds done.
    """
    prompts = Prompts(owner.server, owner.key)
    arms: dict[str, list[float]] = {"other tenant's": [], "own": [], "fresh": [], "also fresh": []}
    order = random.Random(0)
    for done in range(num_samples):
        foreign, own = prompts.draw(), prompts.draw()
        _time(owner, base, foreign)
        _time(prober, base, own)
        sent = {"other tenant's": foreign, "own": own, "fresh": prompts.draw(), "also fresh": prompts.draw()}
        for arm in order.sample(sorted(sent), len(sent)):
            arms[arm].append(_time(prober, base, sent[arm]))
        show_progress(done + 1)
    fresh = arms["fresh"]
    yield _judge(
        "leak: prompts of another tenant against fresh ones", arms["other tenant's"], fresh, differ=False
    )
    yield _judge("null: fresh prompts against fresh ones", arms["also fresh"], fresh, differ=False)
    yield _judge("power: own prompts against fresh ones", arms["own"], fresh, differ=True)


def compare_samples(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Returns the statistic D of the two-sample Kolmogorov-Smirnov test, and its p-value.

    The p-value is asymptotic (Kolmogorov's distribution), which is accurate for samples of 250 values.
    """
    one, two = sorted(first), sorted(second)
    d = max(abs(bisect_right(one, x) / len(one) - bisect_right(two, x) / len(two)) for x in (*one, *two))
    scaled = math.sqrt(len(one) * len(two) / (len(one) + len(two))) * d
    if scaled < 0.2:  # Here the series converges slowly, and the p-value rounds to 1.
        return d, 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return d, min(1.0, max(0.0, 2 * series))


def _judge(cell: str, sample: Sequence[float], fresh: Sequence[float], *, differ: bool) -> Finding:
    d, p = compare_samples(sample, fresh)
    expected = f"p < {ALPHA}" if differ else f"p >= {ALPHA}"
    seen = f"p = {p:.3g}, D = {d:.3f}, {len(sample)} samples an arm"
    return Finding(_PROBE, cell, expected, seen, (p < ALPHA) == differ)


def _time(tenant: AuditedTenant, model: str, prompt: str) -> float:
    """Returns the seconds until an answer of one token has arrived."""
    began = time.perf_counter()
    check(tenant.server.complete(tenant.key, model, prompt))
    return time.perf_counter() - began
