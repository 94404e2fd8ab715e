"""Waiting sequences for tests of queues. They are never computed."""

from slora.core.request import EngineRequest, TenantShare
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence

BLOCK_TOKENS = 4
NO_SHARE = TenantShare()


def make_tenant(name: str, share: TenantShare = NO_SHARE, service: float = 0.0) -> TenantAccount:
    tenant = TenantAccount(name)
    tenant.share = share
    tenant.service = service
    return tenant


def make_sequence(tenant: TenantAccount, priority: int = 0, prompt: int = 1) -> Sequence:
    """Each sequence arrives after all sequences that were made before it."""
    sampling = SamplingParams(max_tokens=1)
    request = EngineRequest("r", tenant.name, [1] * prompt, (), sampling, priority=priority)
    return Sequence(request, tenant, 1, frozenset(), 0, BlockTable(BLOCK_TOKENS))
