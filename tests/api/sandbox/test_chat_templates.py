"""Chat templates are programs of tenants. Each is limited, is charged to its tenant, and does not affect other
tenants."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from slora.core.errors import RequestRefused
from slora_adapters.errors import Reason
from slora_api.core.errors import ServerBusy, TenantBusy
from slora_api.core.fair_slots import cpu_slots
from slora_api.sandbox import chat_templates, sandbox_pool, template_process
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.sandbox.sandbox import SandboxAnswer
from slora_api.sandbox.sandbox_process import SandboxDied, SandboxProcess
from tests.adapters.hand_made import make_members
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine, byte_tokenizer, deltas_of
from tests.api.served import ask_and_leave
from tests.support.child_processes import find_children
from tests.support.clock import Clock
from tests.support.slow_callbacks import Recorder, recording, repeated_if_slow

MESSAGES = [{"role": "user", "content": "hi ünï"}]
# A template need not show a message without text.
EMPTY = [{"role": "user", "content": ""}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"
# Uses much CPU time only for the message 'slow'.
DEPENDS = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}done{{ messages[0].content }}"
SLOW_MESSAGES = [{"role": "user", "content": "slow"}]
T = TypeVar("T")


def with_templates(
    use: Callable[[ChatTemplates], Awaitable[T]],
    render_cpu_s: float = chat_templates.RENDER_CPU_S,
    clock: Clock | None = None,
    num_processes: int = 1,
) -> T:
    async def run() -> T:
        templates = ChatTemplates(
            byte_tokenizer(), cpu_slots(8), render_cpu_s, clock or Clock(), num_processes
        )
        try:
            return await use(templates)
        finally:
            await templates.close()

    return asyncio.run(run())


def renderers() -> list[psutil.Process]:
    return find_children("template_process")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SandboxProcess]]:
    """The renderer process of each request that was sent to one, in order."""
    seen: list[SandboxProcess] = []
    original = SandboxProcess.ask

    async def ask(self: SandboxProcess, request: bytes, timeout_s: float) -> tuple[SandboxAnswer, float]:
        seen.append(self)
        return await original(self, request, timeout_s)

    monkeypatch.setattr(SandboxProcess, "ask", ask)
    yield seen


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_template_is_rendered_or_refused_with_the_reason() -> None:
    size = template_process.MAX_RENDERED_BYTES + 1
    refusals = {
        "{% for": "",
        "{{ raise_exception('no') }}": "no",
        "{{ messages[9].content.upper() }}": "",
        "{{ ''.__class__.__mro__ }}": "",
        "{{ raise_exception('\\ud800') }}": "",
        "ab{{ '\\ud800' }}": r"lone surrogate U\+D800 at character 2",
        f"{{{{ 'x' * {size} }}}}": f"it outputs {size} bytes; at most {size - 1} are accepted",
        "{{ ('x' * 2000000000) | length }}": "bytes of memory",
    }

    async def use(templates: ChatTemplates) -> list[str]:
        for template, reason in refusals.items():
            messages = EMPTY if reason else MESSAGES
            with pytest.raises(RequestRefused, match=reason or None) as caught:
                await templates.render("acme", messages, template)
            assert caught.value.param == "messages", template
            assert str(caught.value).endswith(".") and not str(caught.value).endswith(".."), template
        # An upload has no messages.
        reasons = await templates.check("acme", "{% if %}")
        assert [reason.code for reason in reasons] == ["chat_template_malformed"]
        assert await templates.check("acme", "{{ messages[99].x.y.z }}") == []
        own = "{{ messages[0].content }}!{{ eos_token }}{{ add_generation_prompt }}"
        return [await templates.render("acme", MESSAGES, template) for template in (None, own)]

    assert with_templates(use) == ["[user]hi ünï", "hi ünï!<eos>True"]


@pytest.mark.parametrize("template", [ENDLESS, "{{ 10 ** (10 ** 8) }}"])
def test_an_endless_template_is_stopped_and_does_not_affect_others(template: str) -> None:
    async def use(templates: ChatTemplates) -> str:
        with pytest.raises(RequestRefused, match=r"takes more than 0.3 s of CPU time"):
            await templates.render("acme", EMPTY, template)
        return await templates.render("acme", EMPTY, "fine")

    assert with_templates(use, 0.3) == "fine"


def test_a_template_that_was_too_slow_once_still_renders_other_messages_and_for_others() -> None:
    """Born from an attack: the template's text was refused for all tenants until the server restarted."""

    async def use(templates: ChatTemplates) -> list[str]:
        with pytest.raises(RequestRefused, match="takes more than"):
            await templates.render("hostile", SLOW_MESSAGES, DEPENDS)
        return [await templates.render(tenant, EMPTY, DEPENDS) for tenant in ("honest", "hostile")]

    assert with_templates(use, 0.3) == ["done", "done"]


def test_the_cpu_limit_of_a_rendering_excludes_time_spent_waiting_for_a_cpu(
    asked: list[SandboxProcess],
) -> None:
    """A stopped process uses no CPU time, like a process on a busy machine."""

    async def use(templates: ChatTemplates) -> str:
        await templates.render("acme", EMPTY, "warm")
        os.kill(asked[0].pid, signal.SIGSTOP)
        rendering = asyncio.create_task(templates.render("acme", EMPTY, "late"))
        await asyncio.sleep(0.5)
        os.kill(asked[0].pid, signal.SIGCONT)
        return await rendering

    assert with_templates(use, 0.2) == "late" and len(asked) == 2


def test_a_tenant_that_has_spent_its_cpu_time_is_refused_and_others_are_not() -> None:
    """One of 50 API processes has 0.2 s for each tenant."""
    clock = Clock()

    async def use(templates: ChatTemplates) -> str:
        num_refused = 0
        with pytest.raises(
            TenantBusy, match=r"CPU time for rendering chat templates is used up \(0.2 s"
        ) as refused:
            while num_refused < 10:
                with pytest.raises(RequestRefused, match="takes more than"):
                    await templates.render("hostile", EMPTY, ENDLESS)
                num_refused += 1
        assert await templates.render("honest", EMPTY, "fine") == "fine"
        clock.now += refused.value.retry_after_s
        return await templates.render("hostile", EMPTY, "refilled")

    assert with_templates(use, 0.05, clock, num_processes=50) == "refilled"


def test_a_tenant_with_many_slow_templates_does_not_hold_up_another(asked: list[SandboxProcess]) -> None:
    """Born from attacks: with first come, first served, 50 chats of one tenant delayed another tenant by 32 s, and by
    11 s after their 40 clients had disconnected."""

    async def use(templates: ChatTemplates) -> None:
        hostile = [asyncio.create_task(templates.render("hostile", EMPTY, ENDLESS)) for _ in range(10)]
        await until(lambda: len(asked) == 2)
        running = [renderer.pid for renderer in asked]
        with pytest.raises(TenantBusy, match="8 chat templates, forms and long texts waiting"):
            await templates.render("hostile", EMPTY, "one more")
        # The time limit is long, so the honest tenant never waits for a rendering of the hostile one.
        assert await templates.render("honest", EMPTY, "fine") == "fine"
        assert not any(task.done() for task in hostile) and len(asked) == 3
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        # Those that waited are skipped, and those that ran are killed.
        assert len(asked) == 3 and not any(map(psutil.pid_exists, running))
        assert await templates.render("honest", EMPTY, "fine again") == "fine again"

    with_templates(use, 300.0)


def test_a_client_that_disconnects_ends_its_rendering(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as platform:
        key = platform.key("hostile")
        members = make_members(chat_template_dot_jinja=DEPENDS)
        assert platform.upload(key, "slow", members).status_code == 201
        (idle,) = renderers()
        body = {"model": "slow", "messages": SLOW_MESSAGES}
        client = platform.api(key)
        used_s = cpu_seconds(idle)
        ask_and_leave(client, "/v1/chat/completions", lambda: cpu_seconds(idle) > used_s + 0.1, json=body)
        with suppress(psutil.NoSuchProcess):
            while idle.is_running():
                # Without the end of its client, it would use 2 s.
                assert cpu_seconds(idle) < used_s + 1.5
                time.sleep(0.01)
        answer = client.post("/v1/chat/completions", json={**body, "messages": EMPTY})
        assert answer.status_code == 200, answer.text


def test_the_memory_of_renderings_is_released() -> None:
    """Born from templates of 60 bytes that produced 12 MB of text each: a process stayed at 496 MB."""

    async def use(templates: ChatTemplates) -> None:
        for number in range(3):
            await templates.render(f"tenant {number}", EMPTY, f"{{{{ 'a' * 600000{number} }}}}")
            # Long templates, whose compiled code stays in memory.
            await templates.check(f"tenant {number}", f"{number}" + "{{ a }}" * 4_000)
        resident = [process.memory_info().rss for process in renderers()]
        assert len(resident) <= 1 and sum(resident) <= 96 << 20

    with_templates(use)


def test_a_renderer_that_grew_too_large_is_replaced(
    monkeypatch: pytest.MonkeyPatch, asked: list[SandboxProcess]
) -> None:
    monkeypatch.setattr(sandbox_pool, "MAX_RESIDENT_BYTES", 1)

    async def use(templates: ChatTemplates) -> list[str]:
        return [await templates.render("acme", EMPTY, text) for text in ("one", "two")]

    assert with_templates(use) == ["one", "two"] and asked[0] is not asked[1]
    assert renderers() == []


def test_a_dead_renderer_is_replaced_and_its_request_retried(asked: list[SandboxProcess]) -> None:
    async def use(templates: ChatTemplates) -> list[str]:
        first = await templates.render("acme", EMPTY, "first")
        os.kill(asked[0].pid, signal.SIGSTOP)
        rendering = asyncio.create_task(templates.render("acme", EMPTY, "second"))
        await until(lambda: len(asked) == 2)
        os.kill(asked[0].pid, signal.SIGKILL)
        return [first, await rendering]

    assert with_templates(use) == ["first", "second"] and len(asked) == 3


def test_an_uploaded_template_that_ends_its_process_is_a_reason_to_refuse_the_upload(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found in review: the refusal named the field `messages`, which an upload does not have."""

    async def die(sandbox: SandboxProcess, *_: object) -> None:
        await sandbox.close()
        raise SandboxDied(-signal.SIGSEGV)

    async def use(templates: ChatTemplates) -> list[Reason]:
        await templates.render("acme", EMPTY, "first")
        monkeypatch.setattr(SandboxProcess, "ask", die)
        with pytest.raises(RequestRefused, match="it ended its process with SIGSEGV"):
            await templates.render("acme", EMPTY, "second")
        return await templates.check("acme", "third")

    (reason,) = with_templates(use)
    assert reason.message == "the chat template is not valid: it ended its process with SIGSEGV"
    assert "the process ended with SIGSEGV: the chat template of tenant acme was not" in caplog.text


def test_a_stalled_renderer_is_replaced_and_its_request_retried(
    monkeypatch: pytest.MonkeyPatch, asked: list[SandboxProcess]
) -> None:
    """Found in review: after one stall for any reason, the template was refused until the server restarted."""

    async def use(templates: ChatTemplates) -> str:
        await templates.render("acme", EMPTY, "first")
        os.kill(asked[0].pid, signal.SIGSTOP)
        monkeypatch.setattr(sandbox_pool, "ANSWER_TIMEOUT_S", 0.2)
        rendering = asyncio.create_task(templates.render("acme", EMPTY, "second"))
        await until(lambda: len(asked) == 2)
        monkeypatch.setattr(sandbox_pool, "ANSWER_TIMEOUT_S", 120.0)
        return await rendering

    assert with_templates(use) == "second" and len(asked) == 3


def test_renderers_that_do_not_start_are_a_503_until_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in review: the time limit of a process start was not caught."""
    clock = Clock()

    async def use(templates: ChatTemplates) -> str:
        with monkeypatch.context() as broken:
            broken.setattr(sandbox_pool, "START_TIMEOUT_S", 0.0)
            with pytest.raises(ServerBusy, match=r"could be started; .* Try again in 2 s") as refused:
                await templates.render("acme", EMPTY, "x")
        # During the pause, no further start is tried.
        with pytest.raises(ServerBusy):
            await templates.render("acme", EMPTY, "x")
        clock.now += refused.value.retry_after_s
        return await templates.render("acme", EMPTY, "recovered")

    assert with_templates(use, clock=clock) == "recovered"


def test_conversations_rendered_at_once_do_not_mix() -> None:
    async def use(templates: ChatTemplates) -> list[str]:
        renders = [
            templates.render(
                f"tenant {n % 5}", [{"role": "user", "content": str(n)}], "{{ messages[0].content }}"
            )
            for n in range(20)
        ]
        return list(await asyncio.gather(*renders))

    assert with_templates(use) == [str(n) for n in range(20)]


def test_a_rendering_that_was_cancelled_does_not_answer_the_next_one() -> None:
    async def use(templates: ChatTemplates) -> list[str]:
        for _ in range(4):
            slow = "{% for i in range(3000) %}{% for j in range(100) %}{% endfor %}{% endfor %}slow"
            task = asyncio.create_task(templates.render("acme", EMPTY, slow))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return [await templates.render("acme", EMPTY, "next") for _ in range(2)]

    assert with_templates(use) == ["next", "next"]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as running:
        yield running


@repeated_if_slow
def test_a_long_conversation_does_not_block_the_event_loop_in_the_base_models_template(
    recorder: Recorder,
) -> None:
    """Born from a request with 110,000 messages, which took 1.9 s on the event loop."""
    messages = [{"role": "user", "content": "hi"}] * 5_000

    async def use(templates: ChatTemplates) -> str:
        return await templates.render("acme", messages, None)

    assert with_templates(use) == "[user]hi" * 5_000
    assert not recorder.slow()


def test_a_sandbox_sees_the_variables_that_decide_over_times_locales_and_packages(
    set_variables: Callable[..., None],
) -> None:
    names = ("TZ", "HOME", "LC_TIME", "LOCPATH", "PYTHONUSERBASE")
    set_variables(SLORA_ADMIN_KEY="secret", **dict.fromkeys(names, "/no/such/place") | {"TZ": "TST+11"})
    others, zone = renderers(), timezone(-timedelta(hours=11))
    hours = [datetime.now(zone).strftime("%d %H")]

    async def look(templates: ChatTemplates) -> dict[str, str]:
        rendered = await templates.render("acme", EMPTY, "{{ strftime_now('%d %H') }}")
        assert rendered in [*hours, datetime.now(zone).strftime("%d %H")]
        (renderer,) = [renderer for renderer in renderers() if renderer not in others]
        return renderer.environ()

    seen = with_templates(look)
    assert {seen[name] for name in names} == {"/no/such/place", "TST+11"} and "SLORA_ADMIN_KEY" not in seen


# Answers each request with the niceness of the process.
_TELL_NICENESS = """
import os, sys
from slora_adapters.process.wire import encode, receive
from slora_api.sandbox.sandbox import SandboxAnswer
while receive(sys.stdin.buffer.read) is not None:
    niceness = str(os.getpriority(os.PRIO_PROCESS, 0))
    sys.stdout.buffer.write(encode(SandboxAnswer(niceness, None, 0.0, 0)))
    sys.stdout.buffer.flush()
"""


def test_a_sandbox_has_a_lower_priority_before_it_has_imported_anything() -> None:
    """Born from a bug: it lowered its priority after its imports, which take most of the time of an inspection."""

    async def run() -> str | None:
        command = ("timeit", "--number=1", "--repeat=1", f"--setup={_TELL_NICENESS}", "0")
        sandbox = await SandboxProcess.start(command, template_process.pack_request(""), 60.0)
        try:
            return (await sandbox.ask(template_process.pack_request(""), 60.0))[0].text
        finally:
            await sandbox.close()

    assert asyncio.run(run()) == str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10))
