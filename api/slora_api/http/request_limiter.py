"""Limits how many answers and uploads are in progress, for the whole server. Quotas limit the answers of each tenant.

A request beyond a limit is refused at once. The error says when a permit is expected to be free. The limits apply to
all API processes of the host together. The module runs on one event loop and needs no lock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slora_api.core.errors import BadRequest, Stopping
from slora_api.core.host_board import HostBoard
from slora_api.http.permit_pool import PermitPool


class RequestLimiter:
    """Counts answers and uploads in progress. After `stop()`, no further request is admitted.

    One tenant may hold at most half of the permits for uploads.

    board: None if this process is the only one. clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_uploads: int,
        board: HostBoard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopping = False
        answers, uploads = (board.tally("answers"), board.tally("uploads")) if board else (None, None)
        self._generation_permits = PermitPool(
            max_requests, max_requests, "answers in progress", "max_concurrent_requests", clock, answers
        )
        self._upload_permits = PermitPool(
            max_uploads,
            max(1, max_uploads // 2),
            "uploads in progress",
            "half of max_concurrent_uploads",
            clock,
            uploads,
        )

    @property
    def num_generations(self) -> int:
        """The number of answers in progress in all processes."""
        return self._generation_permits.num_taken

    def wait_s(self, count: int, num_taken: int) -> int:
        """Estimates the seconds until `count` of `num_taken` answers have ended."""
        return self._generation_permits.wait_s(count, num_taken)

    def stop(self) -> None:
        """Refuses new requests from now on. Requests in progress continue."""
        self.stopping = True

    @contextmanager
    def admit_generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> Iterator[None]:
        """Holds a permit for each answer. Raises BadRequest, ServerBusy, TenantBusy or Stopping.

        param: the field that asks for several answers to each prompt.
        """
        self._check_possible(num_prompts, answers_each, param)
        with self._generation_permits.hold(tenant, num_prompts * answers_each):
            yield

    def check_generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> None:
        """Checks that a permit is free for each answer, without taking permits. Raises the same errors as
        `admit_generation`.
        """
        self._check_possible(num_prompts, answers_each, param)
        self._generation_permits.check_available(tenant, num_prompts * answers_each)

    def _check_possible(self, num_prompts: int, answers_each: int, param: str) -> None:
        self._refuse_when_stopping()
        num_answers, permits = num_prompts * answers_each, self._generation_permits
        if num_answers > permits.max_at_once:
            raise BadRequest(
                f"The request asks for {num_answers} answers to all its prompts together; this server "
                f"accepts at most {permits.max_at_once} at once. Send fewer prompts, or a smaller `n` "
                "and `best_of`.",
                "prompt" if answers_each == 1 else param,
            )

    @contextmanager
    def admit_upload(self, tenant: str) -> Iterator[None]:
        """Holds one permit for an upload. Raises ServerBusy, TenantBusy or Stopping."""
        self._refuse_when_stopping()
        with self._upload_permits.hold(tenant, 1):
            yield

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping
