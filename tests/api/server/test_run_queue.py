"""The time that a process waits for a CPU is read from the kernel."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slora_api.processes.supervisor import RunQueue

_SPIN = "import time\nwhile True: pass"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waits for a CPU")
def test_a_process_that_shares_its_core_waits_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    rivals = [
        subprocess.Popen([sys.executable, "-c", _SPIN], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        for _ in range(2)
    ]
    try:
        queue, waited_s = RunQueue(rivals[0].pid), 0.0
        for _ in range(600):
            waited_s += queue.pop_wait_s()
            if waited_s > 0.1:
                break
            time.sleep(0.05)
        assert waited_s > 0.1
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


def test_a_process_that_is_gone_waits_for_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert RunQueue(gone.pid).pop_wait_s() == 0
