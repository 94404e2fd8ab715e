"""What an API process knows of an engine: its last report, and what this process has sent since.

The report says how many of this process's requests the engine had taken by then. So each request counts once: as sent,
or as part of the report. This module does not import torch.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from slora.client.replica_state import ReplicaState
from slora.core.backlog import ANSWER_TOKENS, Backlog
from slora.core.messages import Message, decode_version
from slora.core.request import EngineRequest
from slora_adapters.version import AdapterVersion


def count_answer_tokens(request: EngineRequest) -> int:
    """Returns the expected number of tokens of the answers."""
    if request.pooling is not None:
        return 0
    return request.sampling.width * min(request.sampling.max_tokens or ANSWER_TOKENS, ANSWER_TOKENS)


class _Sent(NamedTuple):
    """A request that the last report does not include. seconds: its estimated work."""

    versions: tuple[AdapterVersion, ...]
    seconds: float


class ReportedState:
    """The state of one engine, as the router sees it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything, because the engine was lost."""
        self._backlog = Backlog()
        self._resident: set[AdapterVersion] = set()
        self._on_host: set[AdapterVersion] = set()
        # The resident adapters, and those of the requests in `_sent`.
        self._expected: set[AdapterVersion] = set()
        self._num_taken = 0
        self._sent: deque[_Sent] = deque()
        self._sent_s = 0.0

    def add_sent(self, request: EngineRequest) -> None:
        """Adds a request that has been sent to the engine."""
        backlog = self._backlog
        seconds = len(request.prompt_token_ids) * backlog.prompt_token_s
        seconds += count_answer_tokens(request) * backlog.answer_token_s
        self._sent.append(_Sent(request.versions, seconds))
        self._sent_s += seconds
        self._expected.update(request.versions)

    def receive(self, message: Message) -> None:
        """Takes in a report of the engine."""
        self._backlog = Backlog(*message["backlog"])
        _apply(message["resident"], self._resident)
        _apply(message["on_host"], self._on_host)
        num_taken: int = message["num_taken"]
        for _ in range(num_taken - self._num_taken):
            self._sent.popleft()
        self._num_taken = num_taken
        self._sent_s = sum(one.seconds for one in self._sent)
        self._expected = self._resident.union(*(one.versions for one in self._sent))

    def describe(self, name: str) -> ReplicaState:
        """Returns the state for the router. The sets are not copied, so they change with the next request."""
        backlog = self._backlog
        return ReplicaState(
            name,
            self._expected,
            self._on_host,
            backlog.num_waiting + len(self._sent),
            backlog.num_running,
            backlog.load_s + self._sent_s,
        )


def _apply(changes: Sequence[Sequence[list[str]]], versions: set[AdapterVersion]) -> None:
    added, removed = changes
    versions.difference_update(decode_version(one) for one in removed)
    versions.update(decode_version(one) for one in added)
