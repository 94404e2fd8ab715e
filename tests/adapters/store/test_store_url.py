"""Modules that need an optional package are named by strings, which neither mypy nor the import contracts check."""

import pytest

from slora_adapters.store.store_url import load_optional


@pytest.mark.parametrize(
    "module",
    [
        "slora_adapters.store.object_store",
        "slora_adapters.store.redis_store",
        "slora_api.quotas.redis_counters",
    ],
)
def test_a_module_with_an_optional_package_is_loaded_by_name(module: str) -> None:
    assert load_optional(module, "extra", "it").__name__ == module
