"""Attacks by chat templates of adapters: slow ones, ones shared with another tenant, ones that fold to much text."""

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.attacks.answers import beside_each_other, count, sent
from bench.attacks.target import Target, adapter_files
from slora.text.chat_template import compile_chat_template

__all__ = ["folded_templates", "half_surrogates", "shared_slow_template", "slow_templates"]

_LAST = "{{ messages[-1].content }}"
_QUADRATIC = (
    "{% for a in messages %}{% for b in messages %}{% if a.content == b.content %}{% endif %}"
    "{% if a.role == b.content %}{% endif %}{% endfor %}{% endfor %}" + _LAST
)
_NUM_MESSAGES = 3000
_SLOW_S = 1.3
_NUM_SLOW = 50
_NUM_FOLDED = 24


def _push(target: Target, key: str, name: str, alpha: float, **extras: str) -> None:
    answer = target.upload(key, name, adapter_files(alpha, **extras))
    if answer.status_code not in (200, 201):
        raise RuntimeError(f"an adapter of the attack was refused: {answer.status_code} {answer.text}")


def shared_slow_template(target: Target) -> Callable[[], str]:
    mallory, honest = target.key("mallory"), target.key("newcomer")
    for key in (mallory, honest):
        _push(target, key, "shared", 4, chat_template=_QUADRATIC)

    def run() -> str:
        before = sent(partial(target.chat, honest, "shared"))
        messages = [{"role": "user", "content": ""}] * _NUM_MESSAGES
        attack = sent(partial(target.chat, mallory, "shared", messages=messages))
        after = sent(partial(target.chat, honest, "shared"))
        return f"attack: {attack}; another tenant before: {before}; after: {after}"

    return run


def slow_template(seconds: float) -> str:
    """Takes about so much CPU time on this machine."""
    loop = "{%% for i in range(%d) %%}{%% for j in range(50000) %%}{%% endfor %%}{%% endfor %%}"
    template = compile_chat_template(loop % 10)
    start = time.thread_time()
    template.render(messages=[])
    rounds = round(10 * seconds / (time.thread_time() - start))
    return loop % max(1, rounds) + _LAST


def slow_templates(target: Target) -> Callable[[], str]:
    mallory, honest = target.key("mallory"), target.key("newcomer")
    _push(target, mallory, "slow", 4, chat_template=slow_template(_SLOW_S))
    _push(target, honest, "slow", 4, chat_template=_LAST)

    def run() -> str:
        sends = [partial(target.chat, mallory, "slow", timeout=30.0) for _ in range(_NUM_SLOW)]
        answers: list[str] = []
        flood = threading.Thread(target=lambda: answers.extend(beside_each_other(sends)))
        flood.start()
        time.sleep(2.0)
        waits = []
        for _ in range(2):
            start = time.perf_counter()
            waits.append(sent(partial(target.chat, honest, "slow")))
            waits.append(f"{time.perf_counter() - start:.1f} s")
        flood.join()
        start = time.perf_counter()
        left = sent(partial(target.chat, honest, "slow"))
        left_s = time.perf_counter() - start
        return (
            f"another tenant meanwhile: {', '.join(waits)}; after all hung up: {left}, {left_s:.1f} s; "
            f"attack: {count([answer[:60] for answer in answers])}"
        )

    return run


def folded_templates(target: Target) -> Callable[[], str]:
    key = target.key("mallory")
    for at in range(_NUM_FOLDED):
        _push(target, key, f"a{at}", 4 + at, chat_template=f"{{{{ 'ab' * {6_000_000 + at} }}}}")

    def run() -> str:
        answers = [sent(partial(target.chat, key, f"a{at}")) for at in range(_NUM_FOLDED)]
        time.sleep(5.0)
        return count([answer[:100] for answer in answers])

    return run


def half_surrogates(target: Target) -> Callable[[], str]:
    key = target.key("mallory")

    def run() -> str:
        config = json.dumps({"chat_template": "\ud800" + _LAST}).encode()
        files: dict[str, Any] = {**adapter_files(), "tokenizer_config.json": config}
        uploaded = sent(partial(target.upload, key, "odd", files))
        chat = sent(partial(target.chat, key, "odd"))
        with target.admin() as admin:
            body = json.dumps({"name": "\ud800"}).encode()
            tenant = sent(
                partial(
                    admin.post, "/admin/tenants", content=body, headers={"Content-Type": "application/json"}
                )
            )
        return f"chat_template: {uploaded}, then {chat}; tenant: {tenant}"

    return run
