import json

import numpy as np
import pytest

from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.peft_directory import parse_adapter
from tests.adapters.hand_made import SHAPE, changed, make_config, make_members, make_tensors, tensor_name


def _digest(members: dict[str, bytes]) -> str:
    views = {name: memoryview(raw) for name, raw in members.items()}
    return parse_adapter(views, SHAPE, AdapterLimits()).digest


HALVES = {name: np.full(value.shape, 0.5, np.float32) for name, value in make_tensors().items()}
BASE = _digest(make_members())

SAME = {
    "who_trained_it": make_members(make_config(base_model_name_or_path="a/b", peft_version="0.99")),
    "order_of_targets": make_members(make_config(target_modules=["down_proj", "q_proj"])),
    "alpha_as_a_float": make_members(make_config(lora_alpha=4.0)),
    "training_settings": make_members(make_config(lora_dropout=0.3, init_lora_weights="gaussian")),
    "order_of_tensors": make_members(tensors=dict(reversed(make_tensors().items()))),
    "extras": make_members(chat_template_dot_jinja="{{ x }}", generation_config_dot_json="{}"),
}

OTHER = {
    "alpha": make_members(make_config(lora_alpha=5)),
    "rslora": make_members(make_config(use_rslora=True)),
    "alpha_pattern": make_members(make_config(alpha_pattern={"q_proj": 5})),
    "order_of_patterns": make_members(make_config(alpha_pattern={"layers.0.*": 5, "q_proj": 7})),
    "order_of_patterns_reversed": make_members(make_config(alpha_pattern={"q_proj": 7, "layers.0.*": 5})),
    "one_bit": make_members(
        tensors=changed(make_tensors(), lambda t: t[tensor_name(1, 6, "B")].view("u4").__ixor__(np.uint32(1)))
    ),
    "dtype": make_members(tensors={n: v.astype("f2") for n, v in make_tensors().items()}),
    "values": make_members(tensors=make_tensors(seed=1)),
}


@pytest.mark.parametrize("what", SAME)
def test_the_digest_ignores_what_does_not_change_the_arithmetic(what: str) -> None:
    assert _digest(SAME[what]) == BASE


def test_the_digest_changes_with_everything_that_does() -> None:
    digests = [_digest(members) for members in OTHER.values()]
    assert len({BASE, *digests}) == 1 + len(OTHER)


def test_weights_moved_between_two_modules_have_another_digest() -> None:
    tensors = make_tensors()
    first, second = tensor_name(0, 0, "A"), tensor_name(1, 0, "A")
    tensors[first], tensors[second] = tensors[second], tensors[first]
    assert _digest(make_members(tensors=tensors)) != BASE


def test_the_digest_is_the_one_that_was_published() -> None:
    """Stores use digests as keys. If the digest changes, every stored adapter is lost, unless DIGEST_VERSION is
    raised too, and a load still accepts the versions before."""
    assert _digest(make_members(json.loads(json.dumps(make_config())), HALVES)) == PUBLISHED


PUBLISHED = "5324b8c97e84b4ebc026c1152b87bd0de6b7ece97466f669fa2cb24c0addeac6"
