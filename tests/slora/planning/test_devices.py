"""Devices and slices are found by name, and an unknown name is answered with the known ones."""

import pytest

from slora.core.errors import ConfigError
from slora.planning.devices import DEVICES, cut_device, find_device


def test_a_device_is_found_in_any_spelling() -> None:
    assert find_device("h100") is DEVICES["H100"]
    assert find_device("rtx 4090") is DEVICES["RTX-4090"]


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"device is 'H1000'; known devices are L4, .*B200; describe another"
    ):
        find_device("H1000")


def test_a_mig_slice_has_sevenths_of_the_compute_and_eighths_of_the_memory() -> None:
    whole = find_device("A100-80")
    part = cut_device(whole, "2g.20gb")
    assert part.count == 3
    assert part.flops == pytest.approx(whole.flops * 2 / 7)
    assert part.bandwidth == pytest.approx(whole.bandwidth * 2 / 8)
    assert whole.memory_bytes / 5 < part.memory_bytes < whole.memory_bytes / 4


def test_all_slices_of_a_profile_fit_into_their_device() -> None:
    for device in DEVICES.values():
        for name, profile in device.profiles.items():
            assert profile.count * profile.compute <= 7 and profile.count * profile.memory <= 8
            assert profile.count * cut_device(device, name).memory_bytes <= device.memory_bytes


def test_an_mps_share_is_a_part_of_everything() -> None:
    whole = find_device("L4")
    part = cut_device(whole, "30%")
    assert part.count == 3
    assert part.memory_bytes == int(0.3 * whole.memory_bytes)
    assert part.bandwidth == pytest.approx(0.3 * whole.bandwidth)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        ("L4", "1g.10gb", "L4 has no MIG profiles; give an MPS share such as 50%"),
        ("H100", "1g.5gb", "H100 has the MIG profiles 1g.10gb, "),
        ("H100", "0%", "H100 has the MIG profiles"),
    ],
)
def test_a_slice_that_a_device_does_not_have_is_refused(device: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_device(find_device(device), name)
