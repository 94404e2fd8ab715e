from collections.abc import Callable
from functools import cache

import pytest

from tests.support.model_kit import ModelKit, make_kit


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelKit]:
    """Returns the kit of a model by name. Each kit is made at its first use."""
    return cache(lambda name: make_kit(tmp_path_factory.mktemp(name), name))
