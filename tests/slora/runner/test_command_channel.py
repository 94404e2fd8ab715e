"""Commands arrive as they were sent, and arrays in the loader's arena are not copied."""

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from slora.runner.rank_channel import CommandChannel
from slora_adapters.loader.host_cache import HostCache
from slora_adapters.peft.packing import ByteArray

_NUM_BYTES = 1 << 16


@pytest.fixture
def kept() -> list[ByteArray]:
    """The arenas that the rank has mapped."""
    return []


@pytest.fixture
def ends(kept: list[ByteArray]) -> Iterator[tuple[CommandChannel, CommandChannel]]:
    """The ends of the leader and of the rank."""
    leader, rank = (end.detach() for end in socket.socketpair())
    channels = CommandChannel(leader), CommandChannel(rank, kept.append)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def caches() -> Iterator[list[HostCache]]:
    caches = [HostCache(_NUM_BYTES) for _ in range(2)]
    yield caches
    for cache in caches:
        cache.close()


def test_an_array_in_the_arena_is_read_from_the_arena(
    ends: tuple[CommandChannel, CommandChannel], kept: list[ByteArray], caches: list[HostCache]
) -> None:
    leader, rank = ends
    arena = caches[0].memory
    leader.pass_arena(arena, caches[0].descriptor)
    leader.send({"content": arena[100:200], "own": np.arange(5), "pages": [1, 2]})
    found = rank.receive()
    assert found["pages"] == [1, 2] and found["own"].tolist() == [0, 1, 2, 3, 4]
    arena[100:200] = 7
    assert found["content"].tolist() == [7] * 100
    assert [len(one) for one in kept] == [_NUM_BYTES]


def test_an_array_in_a_previous_arena_is_copied(
    ends: tuple[CommandChannel, CommandChannel], caches: list[HostCache]
) -> None:
    leader, rank = ends
    for number, cache in enumerate(caches, start=1):
        cache.memory[:] = number
        leader.pass_arena(cache.memory, cache.descriptor)
    leader.send([cache.memory[:8] for cache in caches])
    copied, shared = rank.receive()
    for cache in caches:
        cache.memory[:] = 9
    assert copied.tolist() == [1] * 8 and shared.tolist() == [9] * 8


def test_the_rank_leaves_no_descriptor_of_an_arena_open(
    ends: tuple[CommandChannel, CommandChannel], caches: list[HostCache]
) -> None:
    leader, rank = ends
    before = len(os.listdir("/proc/self/fd"))
    for cache in caches:
        leader.pass_arena(cache.memory, cache.descriptor)
    leader.send(None)
    rank.receive()
    # A mapping keeps one descriptor of its own. The mapping of the first arena has ended.
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_the_end_of_the_leader_is_noticed(ends: tuple[CommandChannel, CommandChannel]) -> None:
    leader, rank = ends
    leader.close()
    with pytest.raises(EOFError):
        rank.receive()
