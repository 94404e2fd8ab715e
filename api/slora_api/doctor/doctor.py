"""`slora doctor`: checks the machine and the settings of a server before it starts, or the server that runs with them.

The checks run at once, each with a time limit. The exit code is 1 if a check fails.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

import slora_api.doctor.checks as checks
from slora.core.errors import ConfigError, SloraError
from slora.core.setting import SettingRefused
from slora_api.cli.declaration import VARIABLES, command, setting_flags
from slora_api.core.key_masking import mask_keys, mask_passwords
from slora_api.core.package_version import find_package_version
from slora_api.core.settings import Settings, read_settings, server_setting_specs
from slora_api.doctor.checks import Finding, Severity, failure
from slora_api.processes.device import DEVICE_LIMIT_S, find_device

logger = logging.getLogger(__name__)

_COLORS = {Severity.OK: "32", Severity.WARNING: "33", Severity.FAILS: "31"}
_ORDER = list(Severity)
# Reading a model takes longer if slora's decoder does not support its family. The model is then built once with torch
# to find its structure.
_MODEL_LIMIT_S = 120.0
_STORE_LIMIT_S = 60.0
_URLS = ("store", "database", "redis", "quota_redis")
# Shorter secrets are not masked, because short strings occur in messages by chance.
_MIN_SECRET_CHARS = 8


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    find: Callable[[], Iterator[Finding]]
    limit_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    findings: Sequence[Finding]  # the worst one first

    @property
    def status(self) -> Severity:
        return self.findings[0].status if self.findings else Severity.OK

    @property
    def detail(self) -> str:
        return "; ".join(finding.detail.rstrip(".") for finding in self.findings)

    @property
    def remedy(self) -> str:
        return "; ".join(finding.remedy for finding in self.findings if finding.remedy)


@command(
    "doctor",
    None,
    setting_flags(server_setting_specs()),
    epilog=f"{VARIABLES} Give the flags and variables of `slora serve`. The exit code is 1 only if a check fails.",
    has_json=True,
)
def diagnose(arguments: argparse.Namespace) -> int:
    flags = vars(arguments)
    texts = {
        spec.name: flags.get(spec.name) or os.environ.get(spec.variable) for spec in server_setting_specs()
    }
    secrets = _find_secrets(texts)
    has_model = bool(texts["model"])
    # At most two facts and eleven checks at once.
    threads = ThreadPoolExecutor(16)
    try:
        # Without a model, all other settings can still be checked.
        settings = read_settings(flags if has_model else {**flags, "model": os.curdir}, os.environ)
    except (ConfigError, SettingRefused) as error:
        chosen = [Check("settings", partial(iter, [failure(str(error))]))]
    else:
        chosen = _choose_checks(settings, flags, threads, has_model=has_model)
    results, has_hung = [], False
    for result, has_ended in run_checks(chosen, threads):
        has_hung |= not has_ended
        results.append(_masked(result, secrets))
        if not arguments.json:
            print(format_line(results[-1]), flush=True)
    counts = Counter(result.status for result in results)
    if arguments.json:
        print(json.dumps(_as_json(results), indent=2), flush=True)
    else:
        print(_summarize(counts), flush=True)
    code = 1 if counts[Severity.FAILS] else 0
    if has_hung:
        # Do not wait for threads that hang in libraries.
        os._exit(code)
    threads.shutdown()
    return code


def _choose_checks(
    settings: Settings, flags: Mapping[str, str | None], threads: ThreadPoolExecutor, *, has_model: bool
) -> list[Check]:
    """Returns the checks in the order of the output. In front of a running server, they check that server.

    flags: the flags of the command line. has_model: whether a base model is configured.
    """
    server = checks.find_server(settings)
    always = [
        Check("data directory", partial(checks.check_data_directory, settings, is_in_use=server is not None)),
        Check("secrets", partial(checks.check_secrets, settings, flags)),
        Check("database", partial(checks.check_database, settings)),
        Check("store", partial(checks.check_store, settings), _STORE_LIMIT_S),
        Check("redis", partial(checks.check_redis, settings)),
    ]
    variables = Check("settings", checks.check_variables)
    if server is not None:
        return [variables, Check("server", partial(checks.check_server, settings, server)), *always]
    device = threads.submit(find_device, settings.engine)
    model = threads.submit(checks.find_model, settings)
    num_ranks, longest_s = settings.engine.tensor_parallel_size, max(DEVICE_LIMIT_S, _MODEL_LIMIT_S)
    check_model = partial(checks.check_model, model) if has_model else checks.explain_no_model
    return [
        variables,
        Check("device", partial(checks.check_device, device, num_ranks), DEVICE_LIMIT_S),
        Check("model", check_model, _MODEL_LIMIT_S),
        Check("memory", partial(checks.check_memory, settings, device, model), longest_s),
        Check("open files", partial(checks.check_open_files, settings)),
        Check("port", partial(checks.check_port, settings)),
        *always,
    ]


def run_checks(chosen: Sequence[Check], threads: ThreadPoolExecutor) -> Iterator[tuple[Result, bool]]:
    """Yields the result of each check in the given order, and whether the check has ended."""
    began = time.monotonic()
    found: list[list[Finding]] = [[] for _ in chosen]
    running = [threads.submit(_run, check, findings) for check, findings in zip(chosen, found, strict=True)]
    for check, findings, run in zip(chosen, found, running, strict=True):
        wait([run], max(0.0, began + check.limit_s - time.monotonic()))
        has_ended, shown = run.done(), list(findings)
        if not has_ended:
            hangs = f"no result within {check.limit_s:g} s"
            shown.append(failure(hangs, "find out what hangs: a disk or a server"))
        shown.sort(key=lambda finding: _ORDER.index(finding.status))
        yield Result(check.name, shown), has_ended


def _run(check: Check, findings: list[Finding]) -> None:
    try:
        for finding in check.find():
            findings.append(finding)
    except (SloraError, OSError, ValueError) as error:
        findings.append(failure(str(error)))
    except Exception as error:
        logger.debug("the check %s failed", check.name, exc_info=True)
        findings.append(failure(f"the check itself failed: {type(error).__name__}: {error}"))


def _find_secrets(texts: Mapping[str, str | None]) -> list[str]:
    """Returns the secrets in the values of settings, the longest one first. Messages of libraries may quote a URL with
    its password.
    """
    found = {texts.get("admin_key") or ""}
    for name in _URLS:
        _, _, rest = (texts.get(name) or "").partition("://")
        credentials, at, _ = rest.rpartition("@")
        password = credentials.partition(":")[2] if at else ""
        _, _, query = rest.partition("?")
        found |= {password, query, unquote(password), unquote(query)}
    return sorted((secret for secret in found if len(secret) >= _MIN_SECRET_CHARS), key=len, reverse=True)


def _masked(result: Result, secrets: Sequence[str]) -> Result:
    def mask(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return mask_passwords(mask_keys(text))

    return Result(
        result.name,
        [Finding(finding.status, mask(finding.detail), mask(finding.remedy)) for finding in result.findings],
    )


def format_line(result: Result) -> str:
    status = result.status.ljust(max(map(len, Severity)))
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        status = f"\x1b[{_COLORS[result.status]}m{status}\x1b[0m"
    remedy = f". Remedy: {result.remedy}" if result.remedy else ""
    # A file name may contain any characters, such as escape sequences.
    text = "".join(char if char.isprintable() else "?" for char in f"{result.detail}{remedy}")
    return f"{status}  {result.name.ljust(14)}  {text}"


def _summarize(counts: Mapping[Severity, int]) -> str:
    if not counts[Severity.FAILS] and not counts[Severity.WARNING]:
        return "slora: everything is in order"
    return f"slora: failed checks: {counts[Severity.FAILS]}, warnings: {counts[Severity.WARNING]}"


def _as_json(results: list[Result]) -> dict[str, object]:
    return {
        "ok": all(result.status != Severity.FAILS for result in results),
        "version": find_package_version(),
        "checks": [
            {"name": result.name, "status": result.status, "detail": result.detail, "remedy": result.remedy}
            for result in results
        ],
    }
