"""What an attack is, and how one is measured: a row says what other tenants noticed and what the server answered."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.attacks.memory_meter import MemoryMeter
from bench.attacks.observer import Noticed
from bench.attacks.target import Limits, Target, attacked_server
from bench.attacks.window import windows_of
from bench.table import Row
from tests.support.slow_callbacks import read_slow_callbacks

__all__ = ["Attack", "measure"]

_CONTROL_S = 6.0
_AFTER_S = 10.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Attack:
    """number: of the finding. in_mixture: whether it can be sent at random beside others.

    plan: prepares the attack, for example by uploads, and returns the attack itself, which returns what was answered,
    within a minute.
    """

    number: int
    title: str
    plan: Callable[[Target], Callable[[], str]]
    limits: Limits = field(default_factory=Limits)
    in_mixture: bool = True


def measure(attack: Attack, sources: Path) -> Row:
    """Starts a server, measures it alone, then under attack."""
    with (
        tempfile.TemporaryDirectory(prefix="slora-attack-") as directory,
        attacked_server(Path(directory), sources, attack.limits) as target,
    ):
        return _measure(attack, target)


def _measure(attack: Attack, target: Target) -> Row:
    memory = MemoryMeter(target.served.process.pid)
    run = attack.plan(target)
    arguments = [target.url, target.key("victim")]
    with windows_of("bench.attacks.observer", Noticed, arguments) as observe:
        time.sleep(2.0)
        with observe() as alone:
            time.sleep(_CONTROL_S)
        before = memory.reset()
        log_bytes = target.log.stat().st_size
        started_at = time.time()
        with observe() as attacked:
            answer = run()
        seconds = time.time() - started_at
        time.sleep(_AFTER_S)
        peak, peak_tree, after = memory.end()
    slow = read_slow_callbacks(target.slow_file, started_at)
    worst = max(slow, key=lambda one: one.cpu_ms, default=None)
    return {
        "no": attack.number,
        "attack": attack.title,
        "seconds": round(seconds, 1),
        "worst healthz ms": attacked[0].worst_probe_ms,
        "failed probes": attacked[0].failed_probes,
        "loop CPU ms": worst.cpu_ms if worst else None,
        "loop blocked ms": max((one.blocked_ms for one in slow), default=None),
        "in": f"{worst.name} | {worst.where}"[:200] if worst else None,
        "RSS before MiB": before // _MIB,
        "RSS peak MiB": peak // _MIB,
        "RSS after MiB": after // _MIB,
        "all processes peak MiB": peak_tree // _MIB,
        "log KiB": (target.log.stat().st_size - log_bytes) >> 10,
        "healthz alone ms": alone[0].worst_probe_ms,
        "p99 ITL alone ms": alone[0].p99_itl_ms,
        "p99 ITL ms": attacked[0].p99_itl_ms,
        "worst ITL ms": attacked[0].worst_itl_ms,
        "victim refused": attacked[0].refused,
        "server": _say_whether_it_lives(target),
        "answer": answer,
    }


def _say_whether_it_lives(target: Target) -> str:
    code = target.served.process.poll()
    if code is None:
        return "alive"
    return f"ended with code {code}: {target.log.read_text(encoding='utf-8').splitlines()[-1:]}"
