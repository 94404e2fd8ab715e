"""Attacks by the fields of a completion: many prompts, long prompts, much output, long stop strings, odd numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.attacks.answers import beside_each_other, count, sent
from bench.attacks.target import Target

__all__ = ["long_prompt", "long_stops", "many_messages", "many_prompts", "much_output", "odd_values"]

Run = Callable[[], str]


def _in_parallel(target: Target, times: int, path: str, body: dict[str, Any]) -> Run:
    """The same body `times` times at once, from two tenants in turn."""
    keys = [target.key(tenant) for tenant in ("mallory", "trudy")]
    sends = [partial(target.post, keys[at % 2], path, body) for at in range(times)]
    return lambda: count(beside_each_other(sends))


def many_prompts(target: Target) -> Run:
    return _in_parallel(
        target, 4, "/v1/completions", {"model": "default", "prompt": ["a"] * 600_000, "max_tokens": 1}
    )


def long_prompt(target: Target) -> Run:
    text = "the quick brown fox " * 200_000
    return _in_parallel(target, 4, "/v1/completions", {"model": "default", "prompt": text, "max_tokens": 1})


def much_output(target: Target) -> Run:
    body = {
        "model": "default",
        "prompt": "a" * 1000,
        "max_tokens": 1,
        "n": 128,
        "echo": True,
        "logprobs": 20,
        "prompt_logprobs": 20,
    }
    return _in_parallel(target, 1, "/v1/completions", body)


def long_stops(target: Target) -> Run:
    stops = ["a" * (240_000 + at) + "b" for at in range(15)]
    body = {
        "model": "default",
        "prompt": "a",
        "max_tokens": 2500,
        "n": 16,
        "ignore_eos": True,
        "logit_bias": {str(token_of_a(target)): 100},
        "stop": stops,
    }
    return _in_parallel(target, 1, "/v1/completions", body)


def token_of_a(target: Target) -> int:
    """The id of the letter `a`, found by asking: the token that a bias of 100 repeats."""
    key = target.key("mallory")
    for token in range(3, 264):
        answer = target.complete(key, max_tokens=1, temperature=0, logit_bias={str(token): 100})
        if answer.json()["choices"][0]["text"] == "a":
            return token
    raise LookupError("no token of the model is the letter a")


def many_messages(target: Target) -> Run:
    messages = [{"role": "user", "content": ""}] * 110_000
    body = {"model": "default", "messages": messages, "max_tokens": 1}
    return _in_parallel(target, 1, "/v1/chat/completions", body)


def odd_values(target: Target) -> Run:
    key = target.key("mallory")

    def run() -> str:
        fields: dict[str, Any] = {
            "top_k": {"top_k": 1 << 64},
            "stop": {"stop": "\ud800"},
            "prompt": {"prompt": "\ud800"},
            "seed": {"seed": 1 << 70},
        }
        return "; ".join(
            f"{name}: {sent(partial(target.complete, key, **values))}" for name, values in fields.items()
        )

    return run
