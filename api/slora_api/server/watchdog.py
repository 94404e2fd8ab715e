"""Judges by its heartbeat whether a child process is stalled. Plain arithmetic: knows no process and no clock.

A child moves while it completes units of work (engine steps, pieces of adapters), while it has no work, and while its
working threads use CPU time. The last rule keeps a slow step on a busy CPU from being taken for a hang: a hung device
or a stopped process uses none. CPU time alone counts for a limited time, because an endless loop uses it, too.

A child that still starts is never judged: reading weights and compiling kernels may take any time.
"""

from dataclasses import dataclass

from slora_adapters.heartbeat import Beat

__all__ = ["STALLED_AFTER_S", "Watchdog"]

# A stalled child makes /readyz fail within 5 s: this, one beat, one poll, and slack for a busy machine.
STALLED_AFTER_S = 3.0
# Even a tenth of a core shared with nine others is more; the overhead of an idle process is far less.
_LEAST_CPU_SHARE = 0.01
# How many times as long as a hang a child may compute without completing anything.
_COMPUTING_PATIENCE = 10
_NO_BEAT = Beat(0, is_serving=False, is_busy=False, num_completed=0, computing_us=0)


@dataclass(slots=True)
class Watchdog:
    """restart_after_s: how long a stall may last. waits_for_others: work of this child may wait for a store, so a pause
    in its work does not make it stalled at once; a missing beat does.

    silent_s: since the last beat. stuck_s: since the child last moved. incomplete_s: since it last completed a unit of
    work or had none.
    """

    restart_after_s: float
    waits_for_others: bool = False
    silent_s: float = 0.0
    stuck_s: float = 0.0
    incomplete_s: float = 0.0
    _last: Beat = _NO_BEAT
    _computing_us: int = 0  # when the child last moved

    @property
    def is_stalled(self) -> bool:
        return (
            self.silent_s if self.waits_for_others else self.stuck_s
        ) > STALLED_AFTER_S or self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """The child is to be killed and started again."""
        patience_s = _COMPUTING_PATIENCE * self.restart_after_s
        return self.stuck_s > self.restart_after_s or self.incomplete_s > patience_s

    def observe(self, beat: Beat, elapsed_s: float) -> None:
        """Takes in the page as it is now, `elapsed_s` after the last call."""
        is_fresh, last, self._last = beat.number != self._last.number, self._last, beat
        self.silent_s = 0.0 if is_fresh else self.silent_s + elapsed_s
        self.stuck_s += elapsed_s
        self.incomplete_s += elapsed_s
        has_completed = is_fresh and (not beat.is_busy or beat.num_completed != last.num_completed)
        if has_completed or not beat.is_serving:
            self.incomplete_s = 0.0
        computed_s = 1e-6 * (beat.computing_us - self._computing_us)
        if self.incomplete_s == 0.0 or (is_fresh and computed_s > _LEAST_CPU_SHARE * self.stuck_s):
            self.stuck_s = 0.0
            self._computing_us = beat.computing_us
        if not beat.is_serving:
            self.silent_s = 0.0
