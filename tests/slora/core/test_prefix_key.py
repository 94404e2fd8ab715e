import struct
from hashlib import sha256
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.prefix_key import extend_keys, root_key
from slora.core.request import WeightedAdapter, compose_adapters
from slora_adapters.version import AdapterVersion

ROOT = root_key("tenant", (), uses_long_rope=False)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def _keys(root: bytes, token_ids: list[int], block_tokens: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, token_ids, block_tokens)
    return keys


def root(scope: str, *adapters: tuple[AdapterVersion, float], long_rope: bool = False) -> bytes:
    composed = compose_adapters(WeightedAdapter(version, weight) for version, weight in adapters)
    return root_key(scope, composed, uses_long_rope=long_rope)


def test_everything_that_content_depends_on_and_the_scope_tell_roots_apart() -> None:
    one, other = AdapterVersion("a", "digest"), AdapterVersion("a", "other")
    roots = [
        root("a"),
        root("b"),
        root("a", long_rope=True),
        root("a", (one, 1.0)),
        root("a", (one, 0.5)),
        root("a", (other, 1.0)),
        root("b", (one, 1.0)),
        root("a", (one, 1.0), (other, 1.0)),
        root("a", (one, 1.0), (other, 0.5)),
        root("a", (one, 0.5), (other, 1.0)),
        # Names that would be ambiguous if they were only concatenated.
        root("a', [], False"),
        root("a", (AdapterVersion("a', 'digest", ""), 1.0)),
        root("a", (AdapterVersion("a", "digest', 1.0), ('a', 'other"), 1.0)),
        root("", (AdapterVersion("aa", "digest"), 1.0)),
        root("aa", (AdapterVersion("", "digest"), 1.0)),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {32}


@pytest.mark.parametrize("scope", ["", "everybody", "a"])
def test_two_tenants_never_share_a_block_of_an_adapter_even_of_the_same_weights_in_a_common_scope(
    scope: str,
) -> None:
    prompt = list(range(40))
    chains = [
        _keys(root(scope, (AdapterVersion(tenant, "the same digest"), 1.0)), prompt)
        for tenant in ("a", "b", "c")
    ]
    for one, other in combinations(chains, 2):
        assert not set(one) & set(other)


def test_equal_sums_of_adapters_have_the_same_root() -> None:
    one, other = AdapterVersion("a", "digest"), AdapterVersion("a", "other")
    assert root("a", (one, 1), (other, 2)) == root("a", (other, 2.0), (one, 0.5), (one, 0.5))
    assert root("a", (one, 0.0), (other, 1.0)) == root("a", (other, 1.0))
    assert root("", (one, 0.5), (one, -0.5)) == root("")


def test_a_key_is_the_hash_of_the_one_before_and_the_tokens_as_little_endian_int32() -> None:
    token_ids = [5, 70_000, 0, 2**31 - 1, 1, 2, 3]
    first = sha256(ROOT + struct.pack("<3i", *token_ids[:3])).digest()
    second = sha256(first + struct.pack("<3i", *token_ids[3:6])).digest()
    assert _keys(ROOT, token_ids, 3) == [first, second]


@given(token_ids=tokens, cuts=st.lists(st.integers(0, 40), max_size=5), block_tokens=st.integers(1, 6))
def test_keys_that_grow_with_the_tokens_are_those_of_all_tokens_at_once(
    token_ids: list[int], cuts: list[int], block_tokens: int
) -> None:
    keys: list[bytes] = []
    for cut in [*sorted(cuts), len(token_ids)]:
        extend_keys(keys, keys[-1] if keys else ROOT, token_ids[:cut], block_tokens)
    assert keys == _keys(ROOT, token_ids, block_tokens)
    assert len(keys) == len(token_ids) // block_tokens


@given(token_ids=st.lists(st.integers(0, 9), min_size=4, max_size=24), data=st.data())
def test_another_token_changes_the_key_of_its_block_and_of_all_that_follow_and_no_other(
    token_ids: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(token_ids) // 4 * 4 - 1))
    changed = token_ids.copy()
    changed[position] += 1
    same = [one == other for one, other in zip(_keys(ROOT, token_ids), _keys(ROOT, changed), strict=True)]
    assert same == [index < position // 4 for index in range(len(same))]


def test_tokens_that_no_int32_holds_are_refused() -> None:
    with pytest.raises(OverflowError):
        _keys(ROOT, [2**31] * 4)
