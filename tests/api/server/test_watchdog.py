"""What the watchdog counts as progress of a child process. Time is simulated in seconds, without a process or a
clock."""

from collections.abc import Iterable

from slora_adapters.process.heartbeat import Beat
from slora_api.processes.supervisor import STALLED_AFTER_S, Watchdog

POLL_S = 0.25


def observe(watchdog: Watchdog, beats: Iterable[Beat]) -> Watchdog:
    for beat in beats:
        watchdog.observe(beat, POLL_S)
    return watchdog


def polls(seconds: float) -> range:
    return range(1, int(seconds / POLL_S) + 1)


def beat(number: int, *, busy: bool = True, completed: int = 0, computing_s: float = 0.0) -> Beat:
    return Beat(number, True, busy, completed, int(1e6 * computing_s))


def test_a_child_without_work_never_stalls() -> None:
    watchdog = observe(Watchdog(60), (beat(n, busy=False) for n in polls(3600)))
    assert not watchdog.is_stalled and not watchdog.is_hopeless


def test_a_child_without_heartbeats_is_stalled_after_three_seconds_even_when_idle() -> None:
    watchdog = observe(Watchdog(60), [beat(n, busy=False) for n in polls(10)])
    last = beat(len(polls(10)), busy=False)
    observe(watchdog, [last for _ in polls(STALLED_AFTER_S)])
    assert not watchdog.is_stalled
    assert observe(watchdog, [last]).is_stalled and not watchdog.is_hopeless
    assert observe(watchdog, [last for _ in polls(60)]).is_hopeless


def test_a_hung_worker_thread_stalls_although_the_socket_thread_beats() -> None:
    watchdog = observe(Watchdog(60), (beat(n, completed=n) for n in polls(10)))
    assert not watchdog.is_stalled
    hung = [beat(n, completed=40) for n in range(41, 41 + len(polls(4)))]
    assert observe(watchdog, hung).is_stalled


def test_a_slow_step_that_uses_cpu_time_is_not_a_stall() -> None:
    """Simulates a prefill on two cores beside ten busy programs. It uses a twentieth of a core and completes
    nothing."""
    slow = (beat(n, computing_s=n * POLL_S * 0.05) for n in polls(300))
    watchdog = observe(Watchdog(60), slow)
    assert not watchdog.is_stalled and not watchdog.is_hopeless


def test_an_endless_computation_is_hopeless_in_the_end() -> None:
    endless = (beat(n, computing_s=n * POLL_S) for n in polls(601))
    assert observe(Watchdog(60), endless).is_hopeless


def test_the_cpu_overhead_of_a_hung_process_is_not_progress() -> None:
    idle = (beat(n, computing_s=n * POLL_S * 0.001) for n in polls(4))
    assert observe(Watchdog(60), idle).is_stalled


def test_a_starting_child_is_never_stalled_and_the_window_restarts_after_the_start() -> None:
    starting = [Beat(0, False, False, 0, 0)] * len(polls(3600))
    watchdog = observe(Watchdog(60), starting)
    assert not watchdog.is_stalled
    observe(watchdog, (beat(n) for n in polls(STALLED_AFTER_S)))
    assert not watchdog.is_stalled


def test_a_slow_store_does_not_stall_the_loader_before_the_restart_limit() -> None:
    watchdog = observe(Watchdog(60, waits_for_others=True), (beat(n) for n in polls(60)))
    assert not watchdog.is_stalled
    watchdog = observe(watchdog, (beat(n + 1000) for n in polls(1)))
    assert watchdog.is_stalled and watchdog.is_hopeless


def test_a_child_that_makes_progress_again_is_no_longer_stalled() -> None:
    watchdog = observe(Watchdog(60), [beat(1)] * len(polls(30)))
    assert watchdog.is_stalled
    assert not observe(watchdog, [beat(2, completed=1)]).is_stalled
