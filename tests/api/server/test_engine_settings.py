"""The settings that `slora serve` passes to its engine process."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from slora.core.engine_config import EngineConfig
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.core.data_dir import open_data_dir
from slora_api.core.settings import Settings, read_settings
from slora_api.processes.children import Sockets, engines_and_loader
from tests.api.conftest import Kit


def engine_settings(settings: Settings, directory: Path) -> dict[str, Any]:
    with open_data_dir(directory) as data:
        children = engines_and_loader(settings, BaseModelFiles(settings), data, Sockets(directory))
    (engine,) = (child for child in children if child.name == "engine")
    told: dict[str, Any] = json.loads(engine.arguments[-1])["engine"]
    return told


def test_every_setting_of_the_engine_is_passed_by_name(kit: Kit, tmp_path: Path) -> None:
    told = engine_settings(Settings(EngineConfig(kit.base)), tmp_path)
    assert set(told) == {field.name for field in fields(EngineConfig)}


def test_memory_and_scheduling_settings_reach_the_engine(kit: Kit, tmp_path: Path) -> None:
    flags = {"prefix_cache": "public", "swap_bytes": "64MiB", "cuda_graphs": "off", "kv_cache_dtype": "fp8"}
    told = engine_settings(read_settings({"model": str(kit.base), **flags}, {}), tmp_path / "chosen")
    expected = flags | {"swap_bytes": 64 << 20, "cuda_graphs": False}
    assert {name: told[name] for name in flags} == expected
    plain = engine_settings(Settings(EngineConfig(kit.base)), tmp_path / "plain")
    assert plain["swap_bytes"] is None and plain["cuda_graphs"] is True
