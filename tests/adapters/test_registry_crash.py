"""A rollout whose process is killed at any moment: what was acknowledged holds, and the rest happened whole or not."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slora_adapters.database import Database
from slora_adapters.registry import Registry
from slora_adapters.sqlite_storage import SqliteStorage

# Each round pushes version n, moves `prod` from n-1 to it and deletes n-1, and says so after each.
ROLLOUT = """
import sys
from slora_adapters.adapter import AdapterExtras
from slora_adapters.database import Database
from slora_adapters.registry import AdapterDetails, Registry
from slora_adapters.sqlite_storage import SqliteStorage
from slora_adapters.version import AdapterVersion

registry = Registry(SqliteStorage(Database(sys.argv[1])))
details = AdapterDetails(8, ("q_proj",), 4096, AdapterExtras())
for number in range(1, 10_000):
    registry.put("voice", AdapterVersion("t", f"{number:064x}"), details)
    print("pushed", number, flush=True)
    before = {number - 1: 100} if number > 1 else {}
    registry.move("t", "voice", "prod", {number: 100}, expected=before)
    print("moved", number, flush=True)
    if number > 1:
        registry.delete("t", f"voice@{number - 1}")
        print("deleted", number - 1, flush=True)
"""


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 17, 60])
def test_a_rollout_that_is_killed_leaves_what_it_acknowledged_and_nothing_half_done(
    tmp_path: Path, num_steps: int
) -> None:
    path = tmp_path / "slora.db"
    acknowledged = {"pushed": 0, "moved": 0, "deleted": 0}
    command = [sys.executable, "-P", "-c", ROLLOUT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(num_steps):
            what, number = process.stdout.readline().split()
            acknowledged[what] = int(number)
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:  # what it said before it died
            what, number = line.split()
            acknowledged[what] = int(number)
    database = Database(path)
    registry = Registry(SqliteStorage(database))
    numbers = {record.number for record in registry.versions("t", "voice")}
    newest, oldest = max(numbers), min(numbers)
    assert newest - acknowledged["pushed"] in (0, 1) and registry.get("t", "voice").number == newest
    assert oldest - acknowledged["deleted"] in (1, 2) and numbers == set(range(oldest, newest + 1))
    rollouts = {rollout.alias: rollout for rollout in registry.aliases("t", "voice")}
    if acknowledged["moved"]:
        (prod,) = rollouts["prod"].targets
        assert prod in numbers and prod - acknowledged["moved"] in (0, 1)
        registry.move("t", "voice", "prod", {newest: 100}, expected={prod: 100})
    registry.delete("t", "voice", force=True)
    assert registry.rollouts("t") == []
    database.close()
