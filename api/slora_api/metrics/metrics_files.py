"""The folder in which API workers keep their counters; see `metrics/metrics.py`."""

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from slora_adapters.process.full_disk import is_full
from slora_api.core.data_dir import DataDir
from slora_api.metrics.metrics import allocate_files


def open_metrics_files(stack: AsyncExitStack, data: DataDir, num_workers: int) -> Path:
    """Returns the folder with an empty file for each worker. The folder is in the data directory if the disk has room,
    else in a temporary directory.
    """
    try:
        allocate_files(data.metrics, num_workers)
        return data.metrics
    except OSError as error:
        if not is_full(error):
            raise
    temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-")))
    allocate_files(temporary, num_workers)
    return temporary
