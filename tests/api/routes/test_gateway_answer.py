"""How often the answer for gateways is made."""

import asyncio

from slora_api.metrics.gateway_answer import GatewayAnswer


def test_scrapes_at_the_same_time_share_one_answer() -> None:
    """Anyone may scrape without a key, and each answer interrupts the engine."""
    now, made = [0.0], 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return b"%d" % made

    async def run() -> None:
        answer = GatewayAnswer(lambda: now[0])
        assert await asyncio.gather(*(answer.read(make) for _ in range(100))) == [b"1"] * 100
        now[0] = 0.04
        assert await answer.read(make) == b"1"
        now[0] = 0.06
        assert await answer.read(make) == b"2"

    asyncio.run(run())
