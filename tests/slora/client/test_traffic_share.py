from slora.client.router import TrafficShare
from slora_adapters.version import AdapterVersion

HOT, COLD = AdapterVersion("acme", "0" * 64), AdapterVersion("acme", "1" * 64)


def test_the_older_window_counts_by_the_part_that_is_recent() -> None:
    share = TrafficShare(100)
    for turn in range(150):
        share.add(HOT if 60 <= turn < 110 else COLD, 1)
    assert share.share(HOT) == (10 + 40 * 0.5) / (50 + 100 * 0.5)


def test_adapters_without_traffic_are_forgotten() -> None:
    share = TrafficShare(10)
    for turn in range(1000):
        share.add(AdapterVersion("acme", f"{turn:064x}"), 5)
    assert len(share._new) + len(share._old) <= 20
    assert share.share(HOT) == 0
