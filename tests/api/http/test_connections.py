"""Which connections are closed to make room for new ones, and which new connections are refused."""

from dataclasses import dataclass, field

from slora_api.http.http_protocol import ConnectionLimits, Connections


@dataclass(eq=False)
class FakeConnection:
    """A connection without any behaviour."""

    host: str
    idle_since: float | None = None
    closed: bool = field(default=False)

    def close_now(self) -> None:
        self.closed = True

    def sweep(self, now_s: float) -> None:
        pass


def fill(connections: Connections, *fakes: FakeConnection) -> None:
    for fake in fakes:
        assert connections.make_room(fake.host) is None
        connections.add(fake, fake.host)


def test_the_longest_idle_connection_of_the_fullest_address_makes_room() -> None:
    connections = Connections(ConnectionLimits(max_connections=5, max_per_address=5))
    others = [FakeConnection("10.0.0.1", 1.0), FakeConnection("10.0.0.3", 2.0)]
    crowd = [FakeConnection("10.0.0.2", since) for since in (None, 8.0, 7.0)]
    fill(connections, *others, *crowd)
    assert connections.make_room("10.0.0.4") is None
    assert [fake.closed for fake in (*others, *crowd)] == [False, False, False, False, True]
    assert len(connections) == 4


def test_a_new_connection_is_refused_only_where_all_others_have_requests() -> None:
    connections = Connections(ConnectionLimits(max_connections=2, max_per_address=2))
    busy, idle = FakeConnection("10.0.0.1"), FakeConnection("10.0.0.2", 1.0)
    fill(connections, busy, idle)
    fill(connections, FakeConnection("10.0.0.3"))
    assert idle.closed and not busy.closed
    reason = connections.make_room("10.0.0.4")
    assert reason is not None and "All 2 connections" in reason
    connections.discard(busy)
    connections.discard(busy)
    assert connections.make_room("10.0.0.4") is None


def test_an_address_at_its_limit_replaces_its_own_connections_only() -> None:
    connections = Connections(ConnectionLimits(max_connections=8))
    mine = [FakeConnection("10.0.0.1") for _ in range(5)]
    fill(
        connections,
        FakeConnection("10.0.0.2", 1.0),
        *mine,
        FakeConnection("10.0.0.1", 5.0),
        FakeConnection("10.0.0.1"),
    )
    # The limit is six of eight connections. The idle one was closed for the last new one.
    reason = connections.make_room("10.0.0.1")
    assert reason is not None and "has 6 connections" in reason and "limit is 6" in reason
    assert len(connections) == 7 and connections.make_room("10.0.0.3") is None


def test_addresses_of_one_ipv6_network_count_as_one_client() -> None:
    connections = Connections(ConnectionLimits(max_connections=100, max_per_address=2))
    fill(
        connections,
        FakeConnection("2001:db8::1"),
        FakeConnection("2001:db8::2%eth0"),
        FakeConnection("::ffff:10.0.0.1"),
    )
    assert connections.make_room("2001:db8::3") is not None
    assert connections.make_room("2001:db8:0:1::3") is None
    fill(connections, FakeConnection("10.0.0.1"))
    assert connections.make_room("10.0.0.1") is not None


def test_a_full_server_closes_idle_connections_by_the_batch() -> None:
    connections = Connections(ConnectionLimits(max_connections=640, max_per_address=640))
    fakes = [FakeConnection("10.0.0.1", float(since)) for since in range(640)]
    fill(connections, *fakes)
    assert connections.make_room("10.0.0.2") is None
    assert [fake.closed for fake in fakes].index(False) == 11 and len(connections) == 629


def test_a_search_that_found_nothing_idle_is_not_repeated_before_the_next_sweep() -> None:
    """Otherwise each refused connection would cost a search of all connections."""
    connections = Connections(ConnectionLimits(max_connections=2, max_per_address=2))
    busy = [FakeConnection("10.0.0.1"), FakeConnection("10.0.0.2")]
    fill(connections, *busy)
    assert connections.make_room("10.0.0.3") is not None
    busy[0].idle_since = 1.0
    assert connections.make_room("10.0.0.3") is not None
    connections.sweep(2.0)
    assert connections.make_room("10.0.0.3") is None and busy[0].closed
