"""Forms of structured output are compiled in a process that a hostile form may end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil
import pytest

from slora.core.errors import RequestRefused
from slora.core.sampling_params import StructuredOutput
from slora_api.core.errors import TenantBusy
from slora_api.core.fair_slots import cpu_slots
from slora_api.sandbox import grammar_checks
from slora_api.sandbox.grammar_checks import GrammarChecks
from tests.support.child_processes import find_children
from tests.support.clock import Clock

T = TypeVar("T")
FINE = StructuredOutput.choice(["yes", "no"], "guided_choice")
# Its lexer has a state for each remainder.
SLOW = StructuredOutput.json_schema({"type": "integer", "multipleOf": 999983}, "response_format")
# Each rule takes a frame of the library's stack.
DEEP = StructuredOutput.grammar(
    "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(3500)) + '\nr3500: "a"', "guided_grammar"
)


def with_checks(
    use: Callable[[GrammarChecks], Awaitable[T]], compile_cpu_s: float = 0.3, num_processes: int = 1
) -> T:
    async def run() -> T:
        checks = GrammarChecks(cpu_slots(8), Clock(), num_processes, compile_cpu_s)
        try:
            return await use(checks)
        finally:
            await checks.close()

    return asyncio.run(run())


def compilers() -> list[psutil.Process]:
    return find_children("grammar_process")


def test_a_form_is_compiled_once_for_each_tenant() -> None:
    async def use(checks: GrammarChecks) -> None:
        await checks.check("acme", FINE)
        (process,) = compilers()
        process.kill()
        while compilers():
            await asyncio.sleep(0.01)
        await checks.check("acme", FINE)
        assert not compilers()  # no process was started for a form that the tenant has used
        await checks.check("globex", FINE)
        assert compilers()  # the time of a check must not tell that another tenant has used the form

    with_checks(use)


def test_hostile_forms_are_refused_and_do_not_affect_others() -> None:
    """They would hang or crash an engine, which cannot stop a compilation. The clock stands still, so a killed process
    costs the 0.2 s of its start. One of 10 API processes has 0.5 s for each tenant."""

    async def use(checks: GrammarChecks) -> None:
        with pytest.raises(
            RequestRefused, match=r"response_format .* takes more than 0.3 s of CPU time"
        ) as slow:
            await checks.check("hostile", SLOW)
        with pytest.raises(RequestRefused, match=r"guided_grammar .* SIGSEGV; simplify it") as deep:
            await checks.check("hostile", DEEP)
        assert (slow.value.param, deep.value.param) == ("response_format", "guided_grammar")
        with pytest.raises(TenantBusy, match="compiling structured output is used up"):
            await checks.check("hostile", SLOW)
        await checks.check("acme", FINE)

    with_checks(use, num_processes=10)


def test_a_server_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "LIBRARY", "a-package-that-nobody-has")

    async def use(checks: GrammarChecks) -> None:
        await checks.check("acme", None)
        with pytest.raises(RequestRefused, match=r"slora\[serve\]") as refused:
            await checks.check("acme", FINE)
        assert refused.value.param == "guided_choice" and not compilers()

    with_checks(use)
