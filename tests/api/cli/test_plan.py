"""`slora plan` prints a plan, the flags for it, and what to change if the load does not fit."""

import json
import shlex
from pathlib import Path

import pytest

from tests.api.command import Ended, run_command

_MODEL = Path(__file__).parents[3] / "demo/model"
_SMALL = ("--device", "L4", "--device-memory", "1536MiB", "--max-num-seqs", "8")
_FEW = ("--adapters", "4", "--prompt-tokens", "20", "--output-tokens", "10")


def plan(*arguments: str) -> Ended:
    return run_command("plan", "--model", str(_MODEL), *_SMALL, *_FEW, *arguments)


def test_a_load_that_fits_ends_with_the_command_that_starts_the_server() -> None:
    ended = plan("--rate", "2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "page pool" in ended.stdout and "TTFT" in ended.stdout and "The load fits." in ended.stdout
    command = shlex.split(ended.stdout.partition("Start the server with:\n")[2].replace("\\\n", ""))
    assert command[:4] == ["slora", "serve", "--model", str(_MODEL)]
    assert "--pool-bytes" in command and command[command.index("--max-num-seqs") + 1] == "8"


def test_a_load_that_does_not_fit_ends_with_code_1_and_what_to_change() -> None:
    ended = plan("--rate", "90000")
    assert ended.returncode == 1
    assert "The load does not fit: " in ended.stdout and "What to change:\n- " in ended.stdout
    assert "Start the server" not in ended.stdout


def test_a_plan_for_several_devices_has_the_sizes_of_one_of_them() -> None:
    plans = [json.loads(plan("--json", "--tensor-parallel-size", size).stdout) for size in ("1", "2")]
    whole, part = (one["memory"] for one in plans)
    assert 0.5 < part["weight_bytes"] / whole["weight_bytes"] < 0.6
    assert part["full_page_bytes"] == whole["full_page_bytes"] // 2
    assert "--tensor-parallel-size 2" in plans[1]["command"]
    shown = plan("--tensor-parallel-size", "2").stdout
    assert "2 of these devices compute together" in shown and "were never measured" in shown


def test_json_has_the_numbers_of_the_plan() -> None:
    ended = plan("--json")
    found = json.loads(ended.stdout)
    memory = found["memory"]
    assert found["fits"] is True and found["problem"] is None
    assert memory["num_pages"] == memory["pool_bytes"] // memory["full_page_bytes"]
    assert found["service"]["requests_per_s"] > 1
    assert f"--pool-bytes {memory['pool_bytes'] // 2**20}MiB" in found["command"]


def test_slices_stand_beside_the_whole_device() -> None:
    ended = plan("--compare", "--device-memory", "12GiB")
    assert ended.returncode == 0
    assert [line.partition("  ")[0] for line in ended.stdout.splitlines()[:4]] == [
        "device",
        "L4",
        "L4 50%",
        "L4 25%",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "H1000"), "device is 'H1000'; known devices are L4, "),
        (("--slice", "1g.5gb"), "L4 has no MIG profiles"),
        (("--rank", "0"), "rank is 0; it must be from 1 to the model's hidden size, 128"),
        (("--rank", "many"), "--rank is 'many'; it must be a rank such as 16"),
        (("--popularity", "skewed"), "--popularity is 'skewed'; it must be uniform, zipf"),
        (("--tensor-parallel-size", "3"), "tensor_parallel_size is 3: this model has 4 attention heads"),
        (("--tensor-parallel-size", "2", "--slice", "50%"), "a tensor-parallel group needs whole GPUs"),
        (("--bandwidth", "fast"), "--bandwidth is 'fast'; it must be a size in bytes"),
        (("--kv-cache-dtype", "fp4"), "--kv-cache-dtype is 'fp4'; it must be"),
        (("--pool-bytes", "2GiB"), "pool_bytes is 2147483648, but weights and activations leave"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(arguments: tuple[str, ...], message: str) -> None:
    ended = plan(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_a_device_by_hand_needs_its_memory_bandwidth_and_flops() -> None:
    ended = run_command("plan", "--model", str(_MODEL), "--bandwidth", "300GB")
    assert ended.returncode == 2
    assert "give --device NAME, or --device-memory, --bandwidth and --flops together" in ended.stderr
