"""Log formats, ids in records, and library loggers."""

import asyncio
import json
import logging
import os
import subprocess
import sys

import pytest

from service.config.settings import LogSettings
from service.log_context import log_context
from service.observability.logs import HumanFormatter, JsonFormatter, logging_config


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.INFO, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    return made


def as_json(made: logging.LogRecord) -> dict[str, object]:
    fields = json.loads(JsonFormatter().format(made))
    assert isinstance(fields, dict)
    return fields


def test_json_record_is_one_line_with_typed_fields() -> None:
    fields = as_json(record("two\nlines of %s", "text", num_tokens=3))
    assert fields["message"] == "two\nlines of text"
    assert fields["num_tokens"] == 3
    assert (fields["level"], fields["logger"], fields["process"]) == ("info", "a.b", "MainProcess")
    assert "\n" not in JsonFormatter().format(record("two\nlines"))


def test_context_ids_are_in_the_record() -> None:
    with log_context(request_id="r1"), log_context(rollout_id="o1", group_id="g1"):
        inside = as_json(record("x"))
    assert (inside["request_id"], inside["rollout_id"], inside["group_id"]) == ("r1", "o1", "g1")
    assert "request_id" not in as_json(record("x"))


async def test_concurrent_requests_have_separate_ids() -> None:
    async def handle(name: str) -> object:
        with log_context(request_id=name):
            await asyncio.sleep(0.01)
            return as_json(record("x"))["request_id"]

    assert tuple(await asyncio.gather(handle("a"), handle("b"))) == ("a", "b")


def test_unknown_id_is_an_error() -> None:
    with pytest.raises(KeyError), log_context(prompt="secret"):
        pass


def test_human_readable_line_ends_with_the_ids() -> None:
    with log_context(group_id="g1"):
        line = HumanFormatter().format(record("done", color_message="\x1b[1mdone"))
    assert line.endswith("INFO    done group_id=g1")


def test_timestamp_that_ray_adds_is_not_written() -> None:
    assert "_ray_timestamp_ns" not in as_json(record("up", _ray_timestamp_ns=1))


def test_line_of_another_process_names_it() -> None:
    line = HumanFormatter().format(record("up", vllm_process_name="EngineCore"))
    assert line.endswith("up process=EngineCore")


def test_exception_is_a_field() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    assert "ValueError: why" in str(as_json(made)["exception"])


def test_configuration_survives_a_file() -> None:
    config = logging_config(LogSettings(format="json", level="debug"))
    assert json.loads(json.dumps(config)) == config


LOG_TWICE = """
import json, logging, logging.config, os
from service.observability.logs import configure_logging
from service.config.settings import LogSettings

def log(message):
    for name in ("uvicorn.error", "vllm.engine", "engine"):
        logging.getLogger(name).error(message)

configure_logging(LogSettings(format="json"))
log("ours")
with open(os.environ["VLLM_LOGGING_CONFIG_PATH"]) as file:  # as vLLM does in each of its processes
    logging.config.dictConfig(json.load(file))
log("vllm's")
"""


def test_library_loggers_use_the_format_in_service_and_engine() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", LOG_TWICE], capture_output=True, text=True, check=True, env=environ
    )
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        (name, message)
        for message in ("ours", "vllm's")
        for name in ("uvicorn.error", "vllm.engine", "engine")
    ]


def test_vllm_stats_are_debug_and_requests_are_not_logged() -> None:
    for level, vllm in (("info", "ERROR"), ("debug", "INFO")):
        loggers = logging_config(LogSettings(level=level))["loggers"]
        assert loggers["vllm"]["level"] == vllm
        assert loggers["uvicorn.access"] == {"handlers": [], "propagate": False}
