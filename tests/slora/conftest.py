from functools import cache

import pytest

from tests.support.model_kit import Kits, ModelKit, make_kit
from tests.support.peft_adapters import KINDS, expert_lora_kinds
from tests.support.tiny_models import OTHER_MODELS, count_layers, few_layers

SMALL_KINDS = {kind: KINDS[kind] for kind in ("odd_rank", "patterns", "r8_on_q_and_v", "some_layers")}


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory, soak: bool) -> Kits:
    """Returns the kit of a model by name. Each kit is made at its first use."""
    return cache(lambda name: make_kit(tmp_path_factory.mktemp(name), name, **few_layers(name, soak=soak)))


@pytest.fixture(scope="session")
def kit(kits: Kits) -> ModelKit:
    return kits("llama")


@pytest.fixture(scope="session")
def expert_kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    """Like `kits`, with adapters of experts and routers."""

    def make(model: str) -> ModelKit:
        changes = {"num_hidden_layers": count_layers(model)} if model in OTHER_MODELS else {}
        return make_kit(tmp_path_factory.mktemp(model), model, expert_lora_kinds(model), **changes)

    return cache(make)


@pytest.fixture(scope="session")
def one_layer_kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    """Four adapters, for steps in Triton's interpreter, which takes a second for each layer."""
    return make_kit(tmp_path_factory.mktemp("one-layer"), "llama", SMALL_KINDS, num_hidden_layers=1)
