from pathlib import Path
from threading import Event

import numpy as np
import pytest

from slora_adapters.errors import AdapterInvalid
from slora_adapters.loader.source import DirectorySource, Fetched, FetchFailed
from slora_adapters.version import AdapterVersion
from tests.adapters.hand_made import SHAPE, make_members, make_tensors, write_directory


@pytest.fixture(params=[0, 2], ids=["in_request", "on_threads"])
def source(request: pytest.FixtureRequest):
    arrived = Event()
    source = DirectorySource(SHAPE, "float32", notify=arrived.set, num_threads=request.param)
    source.arrived = arrived
    yield source
    source.close()


def _fetch(source: DirectorySource, version: AdapterVersion) -> Fetched | FetchFailed:
    source.request(version)
    assert source.arrived.wait(300), "notify was not called"
    source.arrived.clear()
    [result] = source.poll()
    return result


def test_an_added_adapter_arrives_packed(source: DirectorySource, tmp_path: Path) -> None:
    version = source.add(write_directory(tmp_path, make_members()), "t1")
    assert version.tenant == "t1" and len(version.digest) == 64
    result = _fetch(source, version)
    assert isinstance(result, Fetched) and result.version == version
    assert result.packed.buffer.nbytes == result.packed.layout.num_bytes > 0
    assert result.packed.scales[SHAPE.module_id(1, 6)] == 2.0
    source.release(version)
    assert source.poll() == []


def test_a_second_request_in_flight_joins_the_first(source: DirectorySource, tmp_path: Path) -> None:
    version = source.add(write_directory(tmp_path, make_members()))
    source.request(version)
    _fetch(source, version)
    assert isinstance(_fetch(source, version), Fetched), "after poll it may be asked for again"


def test_unknown_and_discarded_versions_are_not_found(source: DirectorySource, tmp_path: Path) -> None:
    unknown = AdapterVersion("t", "0" * 64)
    result = _fetch(source, unknown)
    assert isinstance(result, FetchFailed) and (result.code, result.version) == ("not_found", unknown)
    version = source.add(write_directory(tmp_path, make_members()))
    source.discard(version)
    assert _fetch(source, version).code == "not_found"


def test_weights_changed_after_they_were_added_are_never_served(
    source: DirectorySource, tmp_path: Path
) -> None:
    version = source.add(write_directory(tmp_path, make_members()))
    write_directory(tmp_path, make_members(tensors=make_tensors(seed=1)))
    assert _fetch(source, version).code == "corrupt"
    nan = {name: np.full_like(value, np.nan) for name, value in make_tensors().items()}
    write_directory(tmp_path, make_members(tensors=nan))
    assert _fetch(source, version).code == "corrupt"
    (tmp_path / "adapter_config.json").unlink()
    assert _fetch(source, version).code == "corrupt"


def test_another_directory_with_the_same_weights_serves_a_version_when_one_has_changed(
    source: DirectorySource, tmp_path: Path
) -> None:
    """Born from a bug: only the directory that was added last was read."""
    directories = [tmp_path / "one", tmp_path / "other"]
    versions = {source.add(write_directory(directory, make_members())) for directory in directories}
    [version] = versions
    for directory in directories:
        write_directory(directory, make_members(tensors=make_tensors(seed=1)))
        assert isinstance(_fetch(source, version), Fetched)
        write_directory(directory, make_members())


def test_an_invalid_adapter_is_refused_when_it_is_added(source: DirectorySource, tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalid):
        source.add(write_directory(tmp_path, {"adapter_config.json": b"{}"}))
