"""Builds the objects of files and batches."""

from slora_api.adapters.build import Adapters
from slora_api.batches.batches import Batches
from slora_api.batches.files import Files, file_limits
from slora_api.batches.routes import BatchServices
from slora_api.core.foundation import Foundation
from slora_api.quotas.request_limiter import RequestLimiter


def build_batches(foundation: Foundation, adapters: Adapters, limiter: RequestLimiter) -> BatchServices:
    settings = foundation.settings
    files = Files(foundation.database, adapters.stored, file_limits(settings))
    batches = Batches(foundation.database, files, settings.max_batches_per_tenant)
    return BatchServices(batches, limiter, settings.max_file_bytes, adapters.quarantine)
