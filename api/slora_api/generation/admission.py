"""Limits how many answers and uploads are in progress, for the whole server and for each tenant.

A request beyond a limit is refused at once, with the time after which a place should be free. The module runs on one
event loop and needs no lock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slora_api.errors import BadRequest, Stopping
from slora_api.generation.places import Places

__all__ = ["Admission"]


class Admission:
    """Counts generations and uploads in progress. After `stop()`, no new ones are admitted.

    One tenant has at most half of the places for uploads. clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_per_tenant: int,
        max_uploads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopping = False
        self._generations = Places(
            max_requests, max_per_tenant, "answers in progress", "max_concurrent_per_tenant", clock
        )
        self._uploads = Places(
            max_uploads,
            max(1, max_uploads // 2),
            "uploads in progress",
            "half of max_concurrent_uploads",
            clock,
        )

    @property
    def generations(self) -> int:
        """The number of answers in progress."""
        return self._generations.num_taken

    def stop(self) -> None:
        """Refuses new requests from now on. Requests in progress continue."""
        self.stopping = True

    @contextmanager
    def generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> Iterator[None]:
        """Holds a place for each answer. Raises BadRequest, ServerBusy, TenantBusy or Stopping.

        param: the field that asks for several answers to each prompt.
        """
        self.check_generation(tenant, num_prompts, answers_each, param)
        with self._generations.hold(tenant, num_prompts * answers_each):
            yield

    def check_generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> None:
        """Checks that a place is free now for each answer, without taking it. Raises as `generation` does."""
        self._refuse_when_stopping()
        num_answers, places = num_prompts * answers_each, self._generations
        if num_answers > places.max_at_once:
            raise BadRequest(
                f"The request asks for {num_answers} answers to all its prompts together; this server "
                f"accepts at most {places.max_at_once} at once. Send fewer prompts, or a smaller `n` "
                "and `best_of`.",
                "prompt" if answers_each == 1 else param,
            )
        places.check(tenant, num_answers)

    @contextmanager
    def upload(self, tenant: str) -> Iterator[None]:
        """Holds one place for an upload. Raises ServerBusy, TenantBusy or Stopping."""
        self._refuse_when_stopping()
        with self._uploads.hold(tenant, 1):
            yield

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping
