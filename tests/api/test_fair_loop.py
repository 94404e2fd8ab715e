"""The time of the event loop is shared among tenants, whatever number of requests each of them has in progress."""

import asyncio
from collections import Counter
from contextvars import Context, copy_context
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from slora_adapters.process.shortage import run_event_loop
from slora_api.core.fair_loop import FairEventLoop
from slora_api.core.request_context import RequestContext, current_request
from slora_api.keys.authentication import AuthenticationMiddleware
from slora_api.sandbox.chat_templates import RENDER_CPU_S
from slora_api.sandbox.sandbox_process import SandboxProcess
from slora_api.sandbox.template_process import RendererSettings, pack_request
from tests.api.platform import Platform


def one_callback_each() -> FairEventLoop:
    """Each tenant runs one callback in each pass, whatever time the machine takes for it."""
    return FairEventLoop(quantum_s=0.0)


async def take_steps(tenant: str | None, count: int, taken: Counter[str | None]) -> None:
    if tenant is not None:
        current_request.set(RequestContext("", tenant, tenant))
    await asyncio.sleep(0)
    for _ in range(count):
        taken[tenant] += 1
        await asyncio.sleep(0)


def test_many_requests_of_a_tenant_take_as_many_steps_as_one_request_of_another() -> None:
    """Born from a bug: each step of a chat waited for a step of each of 128 requests of another tenant."""
    taken = Counter[str | None]()

    async def run() -> None:
        flood = [asyncio.create_task(take_steps("flood", 1000, taken)) for _ in range(200)]
        await take_steps("honest", 50, taken)
        for task in flood:
            task.cancel()

    run_event_loop(run(), one_callback_each)
    # In the first pass, no request has a tenant.
    assert taken["honest"] == 50 and 40 < taken["flood"] < 60


def test_what_belongs_to_no_tenant_waits_for_no_queue() -> None:
    taken = Counter[str | None]()

    async def run() -> None:
        flood = [asyncio.create_task(take_steps("flood", 1000, taken)) for _ in range(200)]
        await take_steps(None, 50, taken)
        for task in flood:
            task.cancel()

    run_event_loop(run(), one_callback_each)
    assert taken[None] == 50 and 40 < taken["flood"] < 60


def test_a_task_that_a_request_creates_belongs_to_its_tenant_unless_it_has_its_own_context() -> None:
    order: list[str] = []

    async def note(name: str) -> None:
        order.append(name)

    async def run() -> None:
        current_request.set(RequestContext("", "a", "a"))
        tasks = [asyncio.create_task(note(f"own {number}")) for number in range(3)]
        tasks.append(asyncio.create_task(note("shared"), context=Context()))
        await asyncio.gather(*tasks)

    run_event_loop(run(), one_callback_each)
    assert order == ["own 0", "shared", "own 1", "own 2"] or order == ["shared", "own 0", "own 1", "own 2"]


def test_a_request_waits_in_the_queue_of_its_tenant_as_soon_as_its_key_is_known(platform: Platform) -> None:
    """Born from a bug: a small request is answered in one step, which began before its key was known."""
    keys, answered = platform.services.keys, Counter[str]()
    secrets = {name: platform.key(name) for name in ("flood", "honest")}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answered[scope["state"]["caller"].tenant_name] += 1

    guard = AuthenticationMiddleware(answer, keys.store, keys.use, keys.running, None)

    async def ask(tenant: str) -> None:
        current_request.set(RequestContext(""))
        headers = [(b"authorization", f"Bearer {secrets[tenant]}".encode())]
        scope = {"type": "http", "path": "/v1/limits", "headers": headers, "state": {}}
        await guard(scope, None, None)  # type: ignore[arg-type]

    async def run() -> None:
        for tenant in secrets:  # The keys are cached from now on.
            await asyncio.create_task(ask(tenant))
        flood = [asyncio.create_task(ask("flood")) for _ in range(100)]
        await asyncio.create_task(ask("honest"))
        assert answered["flood"] < 5
        await asyncio.gather(*flood)

    run_event_loop(run(), one_callback_each)
    assert answered == {"flood": 101, "honest": 2}


class PipeNotingLoop(FairEventLoop):
    """Notes which tenants' queues get what asyncio reads from the pipes of processes."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[str | None] = []

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        if isinstance(getattr(callback, "__self__", None), asyncio.SubprocessProtocol):
            request = (context or copy_context()).get(current_request)
            self.tenants.append(None if request is None else request.tenant_id)
        return super().call_soon(callback, *args, context=context)


def test_the_answers_of_a_sandbox_do_not_wait_in_the_queue_of_the_tenant_that_has_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Born from a bug: tenants share the processes, and each chat of one waited for the requests of another."""
    # The tests' own starts use other pipes.
    monkeypatch.setattr(asyncio, "create_subprocess_exec", asyncio.subprocess.create_subprocess_exec)
    settings = RendererSettings({}, RENDER_CPU_S)
    command = "slora_api.sandbox.template_process", settings.to_json()

    async def run() -> list[str | None]:
        started_by = RequestContext("", "flood", "flood")
        current_request.set(started_by)
        sandbox = await SandboxProcess.start(command, pack_request(""), 60.0)
        assert current_request.get() is started_by
        current_request.set(RequestContext("", "honest", "honest"))
        answer, _ = await sandbox.ask(pack_request("{{ messages[0].content }}", [{"content": "hi"}]), 60.0)
        await sandbox.close()
        assert answer.text == "hi"
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PipeNotingLoop)
        return loop.tenants

    with asyncio.Runner(loop_factory=PipeNotingLoop) as runner:
        assert set(runner.run(run())) == {None}


@pytest.mark.parametrize("quantum_s", [0.0, 60.0])
def test_the_callbacks_of_a_tenant_run_in_order_and_each_of_them_once(quantum_s: float) -> None:
    seen: list[int] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        current_request.set(RequestContext("", "a", "a"))
        handles = [loop.call_soon(seen.append, number) for number in range(10)]
        handles[4].cancel()
        loop.call_soon(lambda: loop.call_soon(seen.append, 11))
        loop.call_soon(seen.append, 10)
        done = asyncio.Event()
        loop.call_soon(lambda: loop.call_soon(done.set))
        await done.wait()

    run_event_loop(run(), lambda: FairEventLoop(quantum_s))
    assert seen == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]


def test_a_callback_that_fails_ends_no_other_one() -> None:
    seen: list[object] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"])))
        current_request.set(RequestContext("", "a", "a"))
        loop.call_soon(lambda: 1 // 0)
        loop.call_soon(seen.append, "next")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run_event_loop(run(), one_callback_each)
    assert seen == [ZeroDivisionError, "next"]


def test_a_closed_loop_takes_no_callback() -> None:
    loop = FairEventLoop()
    loop.close()
    context = Context()
    context.run(current_request.set, RequestContext("", "a", "a"))
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print, context=context)
