"""Each token is charged once, by weight. Cached prefix tokens are free. A load or a mask costs as much as the
tokens of its duration."""

from random import Random

import pytest

from slora.core.request import TenantShare
from slora.scheduler.charges import charge_load, charge_mask, charge_output, charge_prompt
from tests.support.queueing import make_sequence, make_tenant
from tests.support.scheduler_bench import COSTS


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_a_prompt_token_costs_1_and_a_generated_token_2_divided_by_weight(weight: float) -> None:
    tenant = make_tenant("a", TenantShare(weight=weight))
    sequence = make_sequence(tenant, prompt=10)
    charge_prompt(sequence, 10)
    assert tenant.service == 10 / weight
    charge_output(sequence)
    assert tenant.service == 12 / weight


def test_a_prompt_is_charged_once_across_chunks_and_recomputation() -> None:
    random = Random(0)
    for _ in range(50):
        tenant = make_tenant("a")
        sequence = make_sequence(tenant, prompt=20)
        sequence.token_ids += [1] * 5  # generated tokens, which are recomputed with the prompt
        while sequence.num_computed < 25:
            num_tokens = random.randint(1, 25 - sequence.num_computed)
            charge_prompt(sequence, num_tokens)
            sequence.num_computed += num_tokens
            if random.random() < 0.2:
                sequence.num_computed = random.choice([0, min(8, sequence.num_computed)])  # preempted
        assert tenant.service == 20


def test_cached_tokens_found_after_a_preemption_are_not_charged() -> None:
    """Born from a bug: a sequence preempted before its first token was charged for prefix blocks that others had
    computed."""
    tenant = make_tenant("a")
    sequence = make_sequence(tenant, prompt=20)
    sequence.num_computed = 16
    charge_prompt(sequence, 4)
    assert tenant.service == 4


def test_a_load_is_charged_as_the_prefill_tokens_of_its_duration() -> None:
    """Loading 10,000 bytes takes 1 ms. Computing one token takes as long."""
    tenant = make_tenant("a", TenantShare(weight=2))
    charge_load(make_sequence(tenant), 10_000, COSTS)
    assert tenant.service == pytest.approx(0.5)


def test_a_mask_is_charged_as_the_prefill_tokens_of_its_cpu_time() -> None:
    tenant = make_tenant("a")
    sequence = make_sequence(tenant)
    charge_mask(sequence, COSTS)
    assert tenant.service == 0  # a sequence without a grammar has no masks
    sequence.mask_s = 0.003
    charge_mask(sequence, COSTS)
    assert tenant.service == pytest.approx(3)
