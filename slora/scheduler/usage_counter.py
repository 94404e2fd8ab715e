"""Counts what all sequences of one unfinished request use together."""


class UsageCounter:
    """The parts of `RequestUsage` that grow while the request runs.

    page_seconds: complete only after all sequences of the request have ended.
    """

    __slots__ = ("adapter_bytes", "generated_tokens", "page_seconds")

    def __init__(self) -> None:
        self.generated_tokens = 0
        self.adapter_bytes = 0
        self.page_seconds = 0.0
