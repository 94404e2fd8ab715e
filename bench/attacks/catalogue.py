"""Every attack that was found, in the order of the findings."""

from bench.attacks import connections, faults, prompts, templates, uploads
from bench.attacks.attack import Attack

__all__ = ["ATTACKS"]

ATTACKS = (
    Attack(1, "4 completions of 600,000 prompts", prompts.many_prompts),
    Attack(2, "4 prompts of 4 MB", prompts.long_prompt),
    Attack(3, "n=128 with echo, logprobs and prompt_logprobs of 1,000 tokens", prompts.much_output),
    Attack(4, "4 unread streams of n=128", connections.mute_readers),
    Attack(
        5,
        "400 idle connections without a key",
        connections.idle_connections,
        connections.FEW_DESCRIPTORS,
        in_mixture=False,
    ),
    Attack(6, "a quadratic chat template that two tenants share", templates.shared_slow_template),
    Attack(7, "50 chats with a template of 1.3 s", templates.slow_templates),
    Attack(8, "4 uploads of one byte in 20 s", connections.slow_uploads),
    Attack(9, "SIGSTOP of the engine, then of the loader", faults.hung_processes, in_mixture=False),
    Attack(10, "a full disk", faults.full_disk, faults.SMALL_DISK, in_mixture=False),
    Attack(11, "30 lists of 30 versions with 500 KB of texts", uploads.large_extras),
    Attack(
        12,
        "two pushes at once, one version allowed",
        uploads.racing_pushes,
        in_mixture=False,
    ),
    Attack(13, "15 stop strings of 240,000 characters", prompts.long_stops),
    Attack(13, "110,000 messages through the base's template", prompts.many_messages),
    Attack(14, "24 templates that fold to 12 MB", templates.folded_templates),
    Attack(15, "numbers beyond 64 bits and half a surrogate pair", prompts.odd_values),
    Attack(15, "an eos_token_id beyond 64 bits in generation_config", uploads.odd_generation_config),
    Attack(16, "half a surrogate pair in a template and a tenant's name", templates.half_surrogates),
    Attack(17, "3,000 chained tar headers, then one of 8 MB", uploads.nested_tars),
    Attack(
        18,
        "a key of `default`, a gzipped body, a store's mode",
        faults.small_things,
        faults.OWN_STORE,
        in_mixture=False,
    ),
)
