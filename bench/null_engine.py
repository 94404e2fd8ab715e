"""The engine process with an engine that computes nothing: each step gives each request a token at once.

It takes the place of `slora.engine.process`; everything around the steps is the real code. With `--no-usage`, it
reports that nothing was used, so that nothing is recorded.
"""

import sys
from collections.abc import Callable
from typing import Any

from slora.core.request import EndedRequest, EngineRequest, FinishReason, RequestUsage, StepOutput, TokenDelta
from slora.engine import process
from slora.engine.engine import Engine

__all__ = ["NULL_TOKEN", "NullEngine"]

# A letter of the tests' tokenizer, so that each token makes a chunk.
NULL_TOKEN = 65
_NO_USAGE = "--no-usage"


class NullEngine(Engine):
    """Ignores all sampling parameters but max_tokens."""

    tells_usage = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left: dict[str, int] = {}
        self._asked: dict[str, EngineRequest] = {}
        self._begun: list[str] = []
        self._ended: list[EndedRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: EngineRequest) -> None:
        self._left[request.request_id] = request.sampling.max_tokens
        self._asked[request.request_id] = request
        self._begun.append(request.request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id in self._left:
            self._end(request_id)

    def step(self, tell_begun: Callable[[list[str]], None] = lambda ids: None) -> list[StepOutput]:
        if self._begun:
            tell_begun(self._begun)
            self._begun = []
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            reason = FinishReason.LENGTH if self._left[request_id] == 0 else None
            outputs.append(StepOutput(request_id, TokenDelta((NULL_TOKEN,), reason)))
            if reason is not None:
                self._end(request_id)
        return outputs

    def pop_usage(self) -> list[EndedRequest]:
        ended, self._ended = self._ended, []
        return ended

    def _end(self, request_id: str) -> None:
        left, request = self._left.pop(request_id), self._asked.pop(request_id)
        generated = request.sampling.max_tokens - left
        used = (
            RequestUsage(len(request.prompt_token_ids), 0, generated) if self.tells_usage else RequestUsage()
        )
        self._ended.append(EndedRequest(request_id, used))


if __name__ == "__main__":
    if _NO_USAGE in sys.argv:
        sys.argv.remove(_NO_USAGE)
        NullEngine.tells_usage = False
    process.Engine = NullEngine  # type: ignore[misc]
    sys.exit(process.main())
