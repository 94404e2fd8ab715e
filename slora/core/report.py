"""What an engine reports to the API processes about ten times a second: for the router, and for the other engines.

This module does not import torch.
"""

from dataclasses import dataclass, field

from slora.core.backlog import Backlog
from slora.core.service_span import ServiceSpan
from slora_adapters.version import AdapterVersion

# Seconds between two reports of a busy engine. A report is late by at most one step. An idle engine reports changes.
REPORT_S = 0.1
# The most accounts in one report. The next reports have the rest.
MAX_SPANS = 256


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The state of an engine between two steps.

    num_taken: number of requests that the engine has taken from its inbox since its start.
    resident: the adapters in the pool, and those that are fetched for requests or prewarms.
    on_host: the adapters in the host cache.
    spans: what the engine has charged since the last report. It is sent once.
    """

    num_taken: int = 0
    backlog: Backlog = field(default_factory=Backlog)
    resident: frozenset[AdapterVersion] = frozenset()
    on_host: frozenset[AdapterVersion] = frozenset()
    spans: tuple[ServiceSpan, ...] = ()
