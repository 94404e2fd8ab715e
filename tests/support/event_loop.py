"""Tests that are coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

# The longest that a test may take. A busy machine needs a minute to start an engine.
_LIMIT_S = 600.0

Arguments = ParamSpec("Arguments")


def on_event_loop(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Runs the test on an event loop of its own."""

    @wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(_LIMIT_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run
