"""`slora doctor`: checks the machine and the settings of a server, before the server starts or while it runs.

The command starts no engine, migrates nothing and takes no lock, so it may run beside a server. The exit code is 1 if a
check fails.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

from slora.errors import ConfigError
from slora.setting import SettingRefused
from slora_api.doctor.check_runner import run_checks
from slora_api.doctor.data_directory import check_data_directory, check_secrets
from slora_api.doctor.device import check_device
from slora_api.doctor.finding import Check, Finding, Result, Status, failure, fine, warning
from slora_api.doctor.machine import check_cores, check_memory, check_open_files, check_shared_memory
from slora_api.doctor.model_files import MODEL_LIMIT_S, check_model, find_model
from slora_api.doctor.secret_mask import SecretMask
from slora_api.doctor.server_probe import check_port, find_server
from slora_api.doctor.shared_fact import SharedFact
from slora_api.doctor.storage import check_clock, check_database, check_redis, check_store
from slora_api.package_version import find_package_version
from slora_api.server.device import DEVICE_LIMIT_S, find_device
from slora_api.settings import Settings, explain_unknown_variables, read_settings, server_setting_specs

__all__ = ["diagnose", "make_checks"]

_COLORS = {Status.OK: "32", Status.WARNING: "33", Status.FAILS: "31"}


def diagnose(arguments: argparse.Namespace) -> int:
    flags = vars(arguments)
    texts = {
        spec.name: flags.get(spec.name) or os.environ.get(spec.variable) for spec in server_setting_specs()
    }
    mask = SecretMask(texts)
    has_model = bool(texts["model"] or texts["demo"])
    try:
        # Without a model, all other settings can still be checked.
        settings = read_settings(flags if has_model else {**flags, "model": os.curdir}, os.environ)
    except (ConfigError, SettingRefused) as error:
        checks = [Check("settings", partial(_fail, str(error)))]
    else:
        checks = make_checks(settings, flags, has_model=has_model)
    results, has_hung = [], False
    for result, has_ended in run_checks(checks):
        has_hung |= not has_ended
        results.append(_masked(result, mask))
        if not arguments.json:
            print(_format_line(results[-1]), flush=True)
    counts = Counter(one.status for one in results)
    if arguments.json:
        print(json.dumps(_as_json(results), indent=2), flush=True)
    else:
        print(_summarize(counts), flush=True)
    code = 1 if counts[Status.FAILS] else 0
    if has_hung:
        # Do not wait for threads that hang in libraries.
        os._exit(code)
    return code


def make_checks(settings: Settings, flags: Mapping[str, str | None], *, has_model: bool) -> list[Check]:
    """Returns all checks, in the order of the output. flags: the flags of the command line. has_model: whether a base
    model is configured.
    """
    device = SharedFact(partial(find_device, settings.engine))
    model = SharedFact(partial(find_model, settings))
    server = SharedFact(partial(find_server, settings))
    longest_s = max(DEVICE_LIMIT_S, MODEL_LIMIT_S)
    return [
        Check("settings", _check_variables),
        Check("device", partial(check_device, device, settings.engine.tensor_parallel_size), DEVICE_LIMIT_S),
        Check("model", partial(check_model, model) if has_model else _explain_no_model, MODEL_LIMIT_S),
        Check("memory", partial(check_memory, settings, device, model, server), longest_s),
        Check("shared memory", partial(check_shared_memory, settings)),
        Check("cores", partial(check_cores, settings, device), DEVICE_LIMIT_S),
        Check("open files", partial(check_open_files, settings)),
        Check("port", partial(check_port, settings, server)),
        Check("data directory", partial(check_data_directory, settings, server)),
        Check("secrets", partial(check_secrets, settings, flags)),
        Check("database", partial(check_database, settings)),
        Check("store", partial(check_store, settings), 60.0),
        Check("redis", partial(check_redis, settings)),
        Check("clock", partial(check_clock, settings), 30.0),
    ]


def _fail(detail: str) -> Iterator[Finding]:
    yield failure(detail)


def _check_variables() -> Iterator[Finding]:
    for unknown in explain_unknown_variables(os.environ):
        yield warning(unknown, "correct or remove the variable")
    yield fine(f"slora {find_package_version()}, Python {sys.version.split()[0]}")


def _explain_no_model() -> Iterator[Finding]:
    yield failure("--model (SLORA_MODEL) is missing", "give the directory of the base model")


def _masked(result: Result, mask: SecretMask) -> Result:
    return Result(
        result.name,
        [Finding(one.status, mask.mask(one.detail), mask.mask(one.remedy)) for one in result.findings],
    )


def _format_line(result: Result) -> str:
    status = result.status.ljust(max(map(len, Status)))
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        status = f"\x1b[{_COLORS[result.status]}m{status}\x1b[0m"
    remedy = f". Remedy: {result.remedy}" if result.remedy else ""
    # A file name may contain any characters, such as escape sequences.
    text = "".join(one if one.isprintable() else "?" for one in f"{result.detail}{remedy}")
    return f"{status}  {result.name.ljust(14)}  {text}"


def _summarize(counts: Mapping[Status, int]) -> str:
    if not counts[Status.FAILS] and not counts[Status.WARNING]:
        return "slora: everything is in order"
    return f"slora: failed checks: {counts[Status.FAILS]}, warnings: {counts[Status.WARNING]}"


def _as_json(results: list[Result]) -> dict[str, object]:
    return {
        "ok": all(one.status != Status.FAILS for one in results),
        "version": find_package_version(),
        "checks": [
            {"name": one.name, "status": one.status, "detail": one.detail, "remedy": one.remedy}
            for one in results
        ],
    }
