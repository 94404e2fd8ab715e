from slora.core.engine_state import LoadPaces


def test_the_load_time_follows_from_the_bytes_and_their_store() -> None:
    paces = LoadPaces(1e-10, {"file": 1e-9, "redis": 3e-9})
    assert paces.load_ms(100_000_000, ("redis", "file")) == {"host": 10.0, "redis": 310.0, "file": 110.0}
    assert paces.load_ms(25_000_000, ("file",), num_ranks=4) == {"host": 2.5, "file": 103.0}
    assert paces.load_ms(0, ("file",)) == {"host": 0.0, "file": 0.0}


def test_the_load_time_from_an_unmeasured_store_is_unknown() -> None:
    assert LoadPaces(1e-10, {"file": 1e-9}).load_ms(1_000_000, ("redis",)) == {"host": 0.1, "redis": None}
