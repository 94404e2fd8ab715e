"""The prefix cache: sequences reuse blocks that were computed for earlier sequences with the same tokens.

The key of a block is a hash chain over scope, adapters, their weights and all tokens so far. The scope is the tenant.
If the operator has set the prefix cache to public, the base model has one scope for all tenants. Clients cannot choose
the scope.

An activated adapter has no effect on the tokens before its invocation, so the blocks before it have the keys of the
base model, and all activated adapters of a tenant share them.

An adapter that changes neither K nor V is left out of the key, because its blocks equal those of the request without
this adapter. In a public prefix cache it stays in the key, because the prompts of adapters are not public.

A model with recurrent layers continues a prefix only from a state that was kept after it. States are large, so they are
kept only where later requests are likely to continue: after the last complete block of a prompt, after the blocks that
a prompt has in common with earlier ones, and after each `_BLOCKS_APART` blocks. A step ends at such a place.
"""

from collections.abc import Callable

from slora.core.prefix_key import extend_keys, join_keys, root_key
from slora.core.request import EngineRequest, WeightedAdapter
from slora.memory.kv_cache import state_key
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.sequence import Sequence
from slora_adapters.version import AdapterVersion

# All prompts with a common beginning have these places in common: each 1,024 tokens, if a block has 16.
_BLOCKS_APART = 64
# A state is kept only if a request that continues from it computes at least this many blocks less than from the state
# before it.
_LEAST_BLOCKS_SAVED = 16


class PrefixCache:
    """Finds the blocks of sequences in the cache and inserts new ones.

    num_queries: number of prompt tokens that were looked up. num_hits: number of these that were found.
    changes_kv: a function that tells whether an adapter changes K or V of any layer. It is called with adapters that
        are in the pool or on the host.
    """

    def __init__(
        self, paging: UnifiedPaging, changes_kv: Callable[[AdapterVersion], bool], *, is_public: bool
    ) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self._kv = paging.kv
        self._footprint = paging.footprint
        self._changes_kv = changes_kv
        self._is_public = is_public

    def count_cached(self, sequence: Sequence) -> int:
        """Returns how many leading blocks need not be computed, because the prefix cache covers them. The sequence
        starts from its first token.

        The last token, and all tokens whose hidden states are still to be pooled, must be computed. So blocks with such
        tokens are not counted.
        """
        sequence.num_matched = sequence.num_kept = 0
        # The prefix cache does not keep the prompt log-probabilities that the sequence still has to report.
        if not self._kv.enabled or sequence.num_scored < sequence.num_prompt:
            return 0
        needed = len(sequence.token_ids) - 1 if sequence.pooled is None else sequence.pooled.next_token
        most = needed // self._footprint.block_tokens
        self._extend_keys(sequence, most)
        keys, has_states = sequence.block_keys[:most], self._footprint.state_pages > 0
        if has_states:
            num_matched = self._kv.match(keys, self._first_needed)
            sequence.num_matched = num_matched * self._footprint.block_tokens
        return self._kv.match(keys, self._first_needed, needs_state=has_states)

    def num_pages(self, num_blocks: int) -> int:
        """How many of the `num_blocks` leading blocks lie within the sliding window."""
        return num_blocks - self._first_needed(num_blocks)

    def adopt(self, sequence: Sequence, num_blocks: int) -> None:
        """Adds cached blocks to the sequence as its first `num_blocks` blocks, so that they are not computed."""
        first = self._first_needed(num_blocks)
        keys = sequence.block_keys[first:num_blocks]
        if self._footprint.state_pages:
            keys = [state_key(keys[-1]), *keys]
        sequence.blocks.adopt(first, self._kv.acquire(keys), self._kv)
        sequence.num_computed = num_blocks * self._footprint.block_tokens
        sequence.num_state_tokens = sequence.num_kept = sequence.num_computed
        sequence.num_named = sequence.num_computed

    def limit_chunk(self, sequence: Sequence, start: int, num_tokens: int) -> int:
        """Returns how many of the `num_tokens` tokens from `start` on a step computes, so that it does not pass a place
        where the recurrent state is to be kept.
        """
        place = self._next_place(sequence, start)
        return num_tokens if place is None else min(num_tokens, place - start)

    def count_hits(self, sequence: Sequence) -> None:
        """Counts the prompt tokens found in the cache, which are neither computed nor charged.

        Called when the sequence is first admitted.
        """
        self.num_queries += sequence.num_prompt
        sequence.num_cached = sequence.num_charged = min(sequence.num_computed, sequence.num_prompt)
        self.num_hits += sequence.num_cached

    def insert(self, sequence: Sequence, num_tokens: int) -> None:
        """Inserts the new complete blocks among the first `num_tokens` tokens, so that later requests can find them.

        The ids of these tokens are known, and the steps that compute them are launched.
        """
        block_tokens = self._footprint.block_tokens
        if num_tokens - sequence.num_named < block_tokens or not self._kv.enabled:
            return
        first, end = sequence.num_named // block_tokens, num_tokens // block_tokens
        self._extend_keys(sequence, end)
        keys, pages = sequence.block_keys, sequence.blocks.pages
        versions = self._find_versions(sequence)
        first_own = sequence.active_from // block_tokens
        for index in range(max(first, sequence.blocks.num_freed), end):
            parent = keys[index - 1] if index else None
            self._kv.insert([int(pages[index])], keys[index], parent, versions if index >= first_own else ())
        sequence.num_named = end * block_tokens

    def insert_state(self, sequence: Sequence, start: int) -> None:
        """Inserts the recurrent state after the computed tokens, if it is to be kept. Called after `insert`.

        start: the first token of the step that computes the state.
        """
        if self._next_place(sequence, start) != sequence.num_computed:
            return
        last = sequence.num_computed // self._footprint.block_tokens - 1
        is_own = last >= sequence.active_from // self._footprint.block_tokens
        versions = self._find_versions(sequence) if is_own else ()
        key = sequence.block_keys[last]
        self._kv.insert(sequence.blocks.state_pages, state_key(key), key, versions)
        sequence.num_kept = sequence.num_computed

    def _next_place(self, sequence: Sequence, start: int) -> int | None:
        """The first place behind `start` where the recurrent state is to be kept: the number of tokens before it.

        Tokens follow that are known already, so no place is in an answer while it is generated.
        """
        footprint = self._footprint
        if not footprint.state_pages or not self._kv.enabled:
            return None
        block_tokens, num_known = footprint.block_tokens, len(sequence.token_ids)
        first = max(start + 1, sequence.num_kept + _LEAST_BLOCKS_SAVED * block_tokens)
        apart = _BLOCKS_APART * block_tokens
        end_of_prompt = (sequence.num_prompt - 1) // block_tokens * block_tokens
        places = (-(-first // apart) * apart, sequence.num_matched, end_of_prompt)
        return min((place for place in places if first <= place < num_known), default=None)

    def _extend_keys(self, sequence: Sequence, num_blocks: int) -> None:
        if len(sequence.block_keys) >= num_blocks:
            return
        keys, tokens, block_tokens = sequence.block_keys, sequence.token_ids, self._footprint.block_tokens
        first_own = min(sequence.active_from, len(tokens)) // block_tokens
        if len(keys) < first_own:
            before = keys[-1] if keys else self._root(sequence, is_active=False)
            extend_keys(keys, before, tokens[: first_own * block_tokens], block_tokens)
        if len(keys) == first_own and sequence.active_from < len(tokens):
            # The first block with an effect of the adapters depends on the blocks before it, too.
            own = self._root(sequence, is_active=True)
            extend_keys(keys, join_keys(own, keys[-1]) if keys else own, tokens, block_tokens)
        elif len(keys) > first_own:
            extend_keys(keys, keys[-1], tokens, block_tokens)

    def _root(self, sequence: Sequence, *, is_active: bool) -> bytes:
        request, uses_long_rope = sequence.request, sequence.uses_long_rope
        scope = "" if self._is_public and not request.adapters else request.tenant
        if not is_active:
            return root_key(scope, (), uses_long_rope=uses_long_rope)
        adapters = self._keyed_adapters(request)
        return root_key(scope, adapters, uses_long_rope=uses_long_rope, active_from=sequence.active_from)

    def _keyed_adapters(self, request: EngineRequest) -> tuple[WeightedAdapter, ...]:
        """Returns the adapters of a request that are part of its blocks' keys. A state depends on all of them."""
        if self._is_public or self._footprint.state_pages:
            return request.adapters
        return tuple(adapter for adapter in request.adapters if self._changes_kv(adapter.version))

    def _find_versions(self, sequence: Sequence) -> tuple[AdapterVersion, ...]:
        """Returns the versions of `_keyed_adapters` for a running sequence."""
        if self._is_public or self._footprint.state_pages:
            return sequence.request.versions
        return tuple([resident.version for resident in sequence.residents if resident.targets.kv])

    def _first_needed(self, num_blocks: int) -> int:
        block_tokens = self._footprint.block_tokens
        return self._footprint.first_token_seen(num_blocks * block_tokens) // block_tokens
