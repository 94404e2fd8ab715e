"""LoaderClient with the real loader process, which is killed at critical moments."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from slora_adapters.loader.loader_client import LoaderClient
from slora_adapters.loader.loader_process import LoaderConfig
from slora_adapters.loader.source import Fetched, FetchFailed
from slora_adapters.peft.packing import ByteArray
from slora_adapters.version import AdapterVersion
from tests.adapters.hand_made import SHAPE
from tests.adapters.stock import AdapterFixtures
from tests.redis_server import RedisServer
from tests.support.forked_program import ForkedProgram

COMMAND = [sys.executable, "-P", "-m", "slora_adapters.loader.loader_process"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": "adapters:kernels"}
# The longest that a test waits for the process on a busy machine.
WAIT_S = 300.0


# The first argument is the other end of the standard input.
PROGRAM = """
import os, sys
os.dup2(os.open(sys.argv.pop(1), os.O_RDONLY), 0)
from slora_adapters.loader.loader_process import main
sys.exit(main())
"""


class LoaderProcess:
    """Runs the loader with a pipe to its standard input, as the supervisor does, but without a new start of Python."""

    def __init__(self, config: LoaderConfig) -> None:
        self.config = config
        self._program: ForkedProgram | None = None
        self._pipe = config.socket.with_name("stdin")
        os.mkfifo(self._pipe)

    def start(self) -> None:
        self._program = ForkedProgram(PROGRAM, self._pipe, "--config", self.config.to_json(), stderr=2)
        self._stdin = self._pipe.open("wb")

    def signal(self, number: signal.Signals) -> None:
        self._program.send_signal(number)

    def kill(self) -> None:
        if self._program is not None:
            self._program.kill()
            self.wait()

    def close_stdin(self) -> None:
        self._stdin.close()

    def wait(self) -> int:
        """Waits for the exit and returns the exit code. Standard output must be empty."""
        program, self._program = self._program, None
        code = program.wait(WAIT_S)
        self.close_stdin()
        assert program.finish() == (code, "")
        return code


class LoaderHarness:
    """A stock of adapters, and a loader process and its client."""

    def __init__(self, root: Path, sockets: Path, **settings) -> None:
        self.stock = AdapterFixtures(root)
        settings = {"store": str(self.stock.store_path), "host_cache_bytes": 1 << 20, **settings}
        config = LoaderConfig(sockets / "loader.sock", shape=SHAPE, dtype="float32", **settings)
        self.process = LoaderProcess(config)
        self.arrived = Event()
        self.clients: list[LoaderClient] = []
        self.client = self.connect()

    def connect(self, **options) -> LoaderClient:
        client = LoaderClient(self.process.config.socket, notify=self.arrived.set, **options)
        self.clients.append(client)
        return client

    def answers(self, count: int, client: LoaderClient | None = None) -> list[Fetched | FetchFailed]:
        """Waits for notifications, as an idle engine does, until `count` answers have arrived."""
        found: list[Fetched | FetchFailed] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < count:
            assert self.arrived.wait(deadline - time.monotonic()), "no answer, or no notification of it"
            self.arrived.clear()
            found += (client or self.client).poll()
        assert len(found) == count
        return found

    def fetch(self, version: AdapterVersion, client: LoaderClient | None = None) -> Fetched | FetchFailed:
        (client or self.client).request(version)
        [answer] = self.answers(1, client)
        assert answer.version == version
        return answer

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.process.kill()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., LoaderHarness]]:
    benches: list[LoaderHarness] = []
    with tempfile.TemporaryDirectory(prefix="loader-") as sockets:  # a socket path may have at most 107 bytes

        def make(**settings) -> LoaderHarness:
            benches.append(LoaderHarness(tmp_path, Path(sockets), **settings))
            return benches[-1]

        yield make
        for bench in benches:
            bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., LoaderHarness]) -> LoaderHarness:
    bench = make_bench()
    bench.process.start()
    return bench


def _v(digest: str, tenant: str = "t1") -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def test_an_adapter_arrives_through_shared_memory_as_packing_made_it(bench: LoaderHarness) -> None:
    version = _v(bench.stock.add(1))
    for _ in range(3):  # requests in flight are joined
        bench.client.request(version)
    [answer] = bench.answers(1)
    assert isinstance(answer, Fetched) and bench.client.poll() == []
    bench.stock.assert_same(version, answer.packed)
    assert answer.packed.buffer.flags.writeable, "torch warns of arrays that are not"
    assert answer.packed.buffer.ctypes.data % 4096 == 0
    assert bench.client.connected
    bench.client.release(version)
    again = bench.fetch(version)
    assert again.packed.buffer.ctypes.data == answer.packed.buffer.ctypes.data, "the host cache kept it"


def test_a_request_sent_before_the_loader_starts_is_answered_after_its_start(
    make_bench: Callable[..., LoaderHarness],
) -> None:
    bench = make_bench()
    version = _v(bench.stock.add(1))
    bench.client.request(version)
    assert not bench.client.connected and bench.client.poll() == []
    assert bench.client.capacity_bytes is None
    bench.process.start()
    [answer] = bench.answers(1)
    assert bench.client.capacity_bytes == 1 << 20
    bench.stock.assert_same(version, answer.packed)


def test_failures_have_their_codes_and_do_not_disturb_others(bench: LoaderHarness) -> None:
    damaged, good = bench.stock.add(1), bench.stock.add(2)
    bench.stock.damage(damaged)
    for digest in ("0" * 64, damaged, good):
        bench.client.request(_v(digest))
    answers = {answer.version.digest: answer for answer in bench.answers(3)}
    assert answers["0" * 64].code == "not_found"
    assert answers[damaged].code == "corrupt"
    bench.stock.assert_same(_v(good), answers[good].packed)


def test_requests_in_flight_at_a_killed_loader_are_answered_by_its_successor(bench: LoaderHarness) -> None:
    held, wanted = _v(bench.stock.add(1)), _v(bench.stock.add(2))
    answer = bench.fetch(held)
    bench.process.signal(signal.SIGSTOP)  # ensures that the request is in flight when the process dies
    bench.client.request(wanted)
    bench.process.kill()
    bench.wait_until(lambda: not bench.client.connected)
    bench.stock.assert_same(held, answer.packed)
    bench.process.start()
    [second] = bench.answers(1)
    bench.stock.assert_same(wanted, second.packed)
    bench.stock.assert_same(held, answer.packed)
    assert second.packed.buffer.ctypes.data != answer.packed.buffer.ctypes.data
    bench.client.release(held)
    bench.client.release(wanted)
    assert bench.client.connected


def test_an_engine_knows_what_the_host_cache_holds_even_if_it_connects_late(
    make_bench: Callable[..., LoaderHarness],
) -> None:
    bench = make_bench(host_cache_bytes=2 * 4096)
    bench.process.start()
    first, second, third = (AdapterVersion(f"t{number}", bench.stock.add(number)) for number in range(3))
    all_of_them = {version.label for version in (first, second, third)}

    def holds(*versions: AdapterVersion, client: LoaderClient = bench.client) -> bool:
        counts = client.count_cached(5, all_of_them)
        assert counts.used_bytes == sum(counts.tenants.values()) == 4096 * counts.num_adapters
        return set(counts.labels) == {version.label for version in versions}

    for version in (first, second):
        assert isinstance(bench.fetch(version), Fetched)
        bench.client.release(version)
    bench.wait_until(lambda: holds(first, second))
    for _ in range(100):  # The first load of a process may take many times as long as the next one.
        assert isinstance(bench.fetch(second), Fetched)
        bench.client.release(second)
    assert bench.client.count_cached(1, ()).tenants.keys() < {"t0", "t1"}
    assert isinstance(bench.fetch(third), Fetched)  # evicts the adapter that was used first
    bench.wait_until(lambda: holds(second, third))
    late = bench.connect()
    bench.wait_until(lambda: holds(second, third, client=late))
    bench.client.discard(second)
    bench.wait_until(lambda: holds(third))
    bench.client.purge("t2")
    bench.wait_until(lambda: holds())
    assert bench.client.count_cached(5, ()).capacity_bytes == 2 * 4096
    bench.process.kill()
    bench.wait_until(lambda: bench.client.count_cached(5, ()).capacity_bytes == 0)


def test_releasing_a_dead_loaders_copy_releases_nothing_in_the_new_arena(
    make_bench: Callable[..., LoaderHarness],
) -> None:
    bench = make_bench(host_cache_bytes=4096)  # room for one adapter
    bench.process.start()
    first, second = _v(bench.stock.add(1)), _v(bench.stock.add(2))
    bench.fetch(first)
    bench.process.kill()
    bench.process.start()
    new = bench.fetch(first)
    bench.client.release(first)  # the older of the two held copies
    bench.client.request(second)
    bench.client.request(_v("0" * 64, "t2"))
    assert bench.answers(1)[0].version.tenant == "t2"
    bench.stock.assert_same(first, new.packed)
    bench.client.release(first)
    [answer] = bench.answers(1)
    bench.stock.assert_same(second, answer.packed)


def test_the_object_made_from_an_arena_lives_as_long_as_a_copy_in_it(bench: LoaderHarness) -> None:
    """The engine pins the arena's memory for its GPU this way, before it receives any copy from the arena."""

    class RecordedArena:
        def __init__(self, arena: ByteArray) -> None:
            self.num_bytes = len(arena)

    made: list[RecordedArena] = []

    def on_arena(arena: ByteArray, _: int) -> RecordedArena:
        made.append(RecordedArena(arena))
        return made[-1]

    version = _v(bench.stock.add(1))
    client = bench.connect(on_arena=on_arena)
    bench.fetch(version, client)
    assert [one.num_bytes for one in made] == [1 << 20]
    kept = weakref.ref(made.pop())
    bench.process.kill()
    bench.wait_until(lambda: not client.connected)
    gc.collect()
    assert kept() is not None, "the copy is held"
    client.release(version)
    bench.wait_until(lambda: (gc.collect(), kept() is None)[1])


def test_without_a_loader_requests_fail_after_the_time_limit(
    make_bench: Callable[..., LoaderHarness],
) -> None:
    bench = make_bench()
    version = _v(bench.stock.add(1))
    client = bench.connect(give_up_s=0.2)
    client.request(version)
    [answer] = bench.answers(1, client)
    assert isinstance(answer, FetchFailed) and answer.code == "unavailable"
    bench.process.start()
    bench.wait_until(lambda: client.connected)
    bench.stock.assert_same(version, bench.fetch(version, client).packed)


def test_a_request_whose_load_killed_three_loaders_fails(bench: LoaderHarness) -> None:
    poison, good = _v(bench.stock.add(1)), _v(bench.stock.add(2))
    bench.stock.hang(poison.digest)
    bench.client.request(poison)
    for _ in range(3):
        bench.wait_until(lambda: bench.client.connected)
        assert bench.client.poll() == []
        bench.process.kill()
        bench.wait_until(lambda: not bench.client.connected)
        bench.process.start()
    [answer] = bench.answers(1)
    assert isinstance(answer, FetchFailed) and (answer.version, answer.code) == (poison, "unavailable")
    bench.stock.assert_same(good, bench.fetch(good).packed)


def test_the_copies_held_by_a_dead_engine_are_released(make_bench: Callable[..., LoaderHarness]) -> None:
    bench = make_bench(host_cache_bytes=4096)
    bench.process.start()
    first, second = _v(bench.stock.add(1)), _v(bench.stock.add(2))
    bench.fetch(first)
    other = bench.connect()
    other.request(second)
    bench.client.close()
    [answer] = bench.answers(1, other)
    bench.stock.assert_same(second, answer.packed)


def test_two_engines_share_one_copy(bench: LoaderHarness) -> None:
    version = _v(bench.stock.add(1))
    other = bench.connect()
    bench.stock.assert_same(version, bench.fetch(version).packed)
    bench.stock.assert_same(version, bench.fetch(version, other).packed)
    bench.client.release(version)
    bench.client.discard(version)
    bench.stock.store.delete(version.digest)
    assert bench.fetch(version).code == "not_found"


def test_after_a_purge_no_adapter_of_the_tenant_is_in_the_arena(bench: LoaderHarness) -> None:
    version = _v(bench.stock.add(1))
    packed = bench.fetch(version).packed
    assert packed.buffer.any()
    bench.client.release(version)
    bench.stock.store.delete(version.digest)
    bench.client.purge(version.tenant)
    assert bench.fetch(version).code == "not_found"
    assert not packed.buffer.any()


def test_a_config_may_come_in_a_file_so_that_no_password_is_in_the_process_list(
    bench: LoaderHarness, tmp_path: Path
) -> None:
    arguments = tmp_path / "arguments"
    socket = bench.process.config.socket.with_name("other.sock")
    arguments.write_text(
        f"--config\n{replace(bench.process.config, socket=socket).to_json()}\n", encoding="utf-8"
    )
    with subprocess.Popen([*COMMAND, f"@{arguments}"], stdin=subprocess.PIPE, env=ENVIRONMENT) as process:
        client = LoaderClient(socket)
        bench.wait_until(lambda: client.connected)
        client.close()
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


def test_a_client_closed_while_it_connects_disconnects(bench: LoaderHarness) -> None:
    connecting, closing = Event(), Event()

    def wait_for_the_end(arena: object, descriptor: int) -> None:
        connecting.set()
        assert closing.wait(WAIT_S)

    client = LoaderClient(bench.process.config.socket, on_arena=wait_for_the_end)
    assert connecting.wait(WAIT_S)
    closer = Thread(target=client.close, daemon=True)
    closer.start()
    bench.wait_until(lambda: client.is_closed)
    closing.set()
    closer.join(WAIT_S)
    assert not closer.is_alive() and not client.connected


def test_the_loader_exits_when_its_standard_input_closes(bench: LoaderHarness) -> None:
    bench.fetch(_v(bench.stock.add(1)))
    bench.process.close_stdin()
    assert bench.process.wait() == 0
    bench.wait_until(lambda: not bench.client.connected)


def test_the_loader_exits_on_sigterm_and_not_on_ctrl_c(bench: LoaderHarness) -> None:
    bench.fetch(_v(bench.stock.add(1)))
    bench.process.signal(signal.SIGINT)
    assert isinstance(bench.fetch(_v(bench.stock.add(2))), Fetched)
    bench.process.signal(signal.SIGTERM)
    assert bench.process.wait() == 0


def test_adapters_come_from_redis_too(
    make_bench, make_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    bench = make_bench(warm=make_redis().url)
    bench.process.start()
    version = _v(bench.stock.add(1))
    bench.stock.assert_same(version, bench.fetch(version).packed)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "int8"}, 2),
        ({"store": "s3://bucket"}, 2),
        ({"warm": "/a/path"}, 2),
        ({"store": "unix:///nowhere/redis.sock"}, os.EX_TEMPFAIL),
    ],
)
def test_an_invalid_config_ends_the_loader_with_a_distinct_exit_code(
    make_bench: Callable[..., LoaderHarness], change: dict[str, str], code: int
) -> None:
    bench = make_bench()
    bench.process.config = replace(bench.process.config, **change)
    bench.process.start()
    assert bench.process.wait() == code


def test_a_redis_without_durable_settings_is_an_invalid_config(
    make_bench, make_redis: Callable[..., RedisServer]
) -> None:
    bench = make_bench(store=make_redis().url)
    bench.process.start()
    assert bench.process.wait() == 2


def test_the_loader_and_its_client_never_import_torch() -> None:
    code = "import slora_adapters.loader.loader_process, slora_adapters.loader.loader_client;"
    code += "import slora_adapters.registry.registry, sys;"
    code += "sys.exit('torch' in sys.modules or 'redis' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], env=ENVIRONMENT, check=False).returncode == 0


def test_a_config_round_trips_through_json() -> None:
    config = LoaderConfig(Path("/x/l.sock"), "file:///s", SHAPE, "bfloat16", "redis://w", 123, 32, 3, 1)
    assert LoaderConfig.from_json(config.to_json()) == config
    for broken in ("{}", '{"surprise": 1}', "[", '{"socket": 1, "shape": {}}'):
        with pytest.raises(ValueError):
            LoaderConfig.from_json(broken)
