"""Modules that need an optional package are named by strings, which neither mypy nor the import contracts check."""

import pytest

from slora_adapters.store.store_url import load_optional


@pytest.mark.parametrize("module", ["registry.redis_registry", "store.object_store", "store.redis_store"])
def test_a_module_with_an_optional_package_is_loaded_by_name(module: str) -> None:
    assert load_optional(module, "extra", "it").__name__ == f"slora_adapters.{module}"
