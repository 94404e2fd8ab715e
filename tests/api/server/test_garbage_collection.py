import sys
from pathlib import Path

from tests.api.conftest import Kit
from tests.api.served import READY_S, serving

_CODE = """
import gc
from slora_api.cli.main import main
main()
print("frozen", gc.get_freeze_count())
"""


def test_full_garbage_collections_skip_long_lived_objects(kit: Kit, tmp_path: Path) -> None:
    """Born from a bug: a full collection of 75 MiB of modules and routes blocked the event loop for 50 ms."""
    with serving(kit.base, tmp_path / "data", command=(sys.executable, "-P", "-c", _CODE)) as served:
        served.wait_for_line("listening on")
        served.process.terminate()
        served.process.wait(READY_S)
    frozen = next(line for line in served.lines if line.startswith("frozen "))
    assert int(frozen.split()[1]) > 10_000
