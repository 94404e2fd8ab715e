"""Decides from the heartbeats of a child process whether the child is stalled.

This module only computes. It starts no processes and reads no clocks.

A child makes progress in three cases: it completes units of work (engine steps, pieces of adapters), it has no work, or
its working threads use CPU time. CPU time distinguishes a slow step on a busy CPU from a hang: a process that waits for
a hung device, or that is stopped, uses no CPU time. CPU time alone counts as progress only for a limited time, because
an endless loop also uses CPU time.

A child that is still starting never counts as stalled, because reading weights and compiling kernels may take any time.
"""

from dataclasses import dataclass

from slora_adapters.process.heartbeat import Beat

# /readyz fails within 5 s of a stall: this time, one heartbeat, one poll, and a margin for a busy machine.
STALLED_AFTER_S = 3.0
# The minimum share of its time that a computing process spends on a CPU, even if it gets only a tenth of a core. An
# idle process spends far less.
_LEAST_CPU_SHARE = 0.01
# A child may use CPU time without completing any work for this many times `restart_after_s`.
_COMPUTING_PATIENCE = 10
_NO_BEAT = Beat(0, is_serving=False, is_busy=False, num_completed=0, computing_us=0)


@dataclass(slots=True)
class Watchdog:
    """Decides whether one child is stalled.

    restart_after_s: how long a stall may last.
    waits_for_others: whether the child's work may wait for a store. Such a child is stalled after STALLED_AFTER_S
    without a heartbeat, or after restart_after_s without progress.
    silent_s: seconds since the last heartbeat.
    stuck_s: seconds since the child last made progress.
    incomplete_s: seconds since the child last completed a unit of work or had no work.
    """

    restart_after_s: float
    waits_for_others: bool = False
    silent_s: float = 0.0
    stuck_s: float = 0.0
    incomplete_s: float = 0.0
    _last: Beat = _NO_BEAT
    _computing_us: int = 0  # The CPU time when the child last made progress.

    @property
    def is_stalled(self) -> bool:
        return (
            self.silent_s if self.waits_for_others else self.stuck_s
        ) > STALLED_AFTER_S or self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether the child must be killed and restarted."""
        patience_s = _COMPUTING_PATIENCE * self.restart_after_s
        return self.stuck_s > self.restart_after_s or self.incomplete_s > patience_s

    def observe(self, beat: Beat, elapsed_s: float) -> None:
        """Updates the times of this watchdog from the content of the heartbeat page. elapsed_s: seconds since the last
        call.
        """
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
