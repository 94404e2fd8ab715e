"""The log as an operator's tools read it."""

import json
from pathlib import Path

import pytest

from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, environment, serving
from tests.support.forked_program import ForkedProgram

KEY = "slora_abcdefgh_" + "S" * 43

_SCRIPT = f"""
import logging, sys, threading
from contextvars import copy_context
from slora_adapters.process.logs import set_up_logging
from slora_api.core.key_masking import mask_keys
from slora_api.core.request_context import RequestContext, RequestFields, current_request

set_up_logging(sys.argv[1], "API worker 3", RequestFields(), label="[3] ", mask=mask_keys)
logger = logging.getLogger("slora.api")
logger.info("starts")
current_request.set(RequestContext("req_0"))
logger.info("refused")
current_request.set(RequestContext("req_1", "acme"))
thread = threading.Thread(target=copy_context().run, args=(logger.warning, "model %r is unknown", "{KEY}\\n"))
thread.start()
thread.join()
try:
    raise ValueError("{KEY}")
except ValueError:
    logger.exception("broke")
"""


def log_lines(log_format: str) -> list[str]:
    code, output = ForkedProgram(_SCRIPT, log_format).finish()
    assert code == 0 and KEY not in output and "slora_abcdefgh_***" in output
    return output.splitlines()


def test_each_line_of_json_is_an_object_that_names_its_request() -> None:
    starts, refused, unknown, broke = map(json.loads, log_lines("json"))
    assert starts.keys() == {"time", "level", "process", "logger", "message"}
    assert (starts["level"], starts["process"], starts["logger"]) == ("info", "API worker 3", "slora.api")
    assert starts["time"].endswith("+00:00")
    assert refused["request_id"] == "req_0" and "tenant" not in refused
    assert (unknown["request_id"], unknown["tenant"], unknown["level"]) == ("req_1", "acme", "warning")
    assert unknown["message"] == "model 'slora_abcdefgh_***\\n' is unknown", (
        "a thread logs for the request, too"
    )
    assert broke["message"] == "broke" and "ValueError: slora_abcdefgh_***" in broke["exception"]


def test_lines_of_text_have_the_number_of_the_worker() -> None:
    starts, *_ = log_lines("text")
    assert starts.endswith(" [3] slora.api INFO starts")


@pytest.mark.soak
@pytest.mark.parametrize("workers", ["1", "2"])
def test_all_processes_of_a_server_log_json(
    kit: Kit, tmp_path: Path, workers: str, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--api-workers", workers, "--log-format", "json")
    env = environment(SLORA_ADMIN_KEY=ADMIN_KEY, SLORA_TYPO="1")
    with serving(kit.base, tmp_path / "data", *flags, env=env) as served:
        served.wait_until_ready()
        served.child("loader_process").kill()
        served.wait_for_metric('slora_process_restarts_total{process="loader"}', 1)
        served.wait_until_ready()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert {"API", "engine"} <= {line["process"] for line in lines}
    assert any("SLORA_TYPO is not a setting" in line["message"] for line in lines)
    assert any(line["message"] == "loader lost" for line in lines)
