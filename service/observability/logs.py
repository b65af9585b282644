"""Logging: one handler and one format for all loggers in all processes of the server.

Records have the ids of their request, rollout and group, and the name of the caller's key. Prompts
and responses are never passed to a logger.
"""

import json
import logging
import os
from datetime import UTC, datetime
from logging.config import dictConfig
from pathlib import Path
from typing import Any

from service.config.settings import LogSettings
from service.log_context import current_ids

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "asctime",
    "message",
    "taskName",
    "color_message",  # uvicorn's message with escape codes
    "vllm_process_name",
    "_ray_timestamp_ns",  # Ray adds it to all records
}


def _details(record: logging.LogRecord) -> dict[str, Any]:
    extra = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    return {**current_ids(), **extra}


def _process(record: logging.LogRecord) -> str:
    """Process name of a log record: vLLM's descriptive name if set, else multiprocessing's."""
    return str(getattr(record, "vllm_process_name", record.processName))


class JsonFormatter(logging.Formatter):
    """Log formatter that writes each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": _process(record),
            "message": record.getMessage(),
            **_details(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class HumanFormatter(logging.Formatter):
    """Log formatter for people: time, level, message, process (if not main) and extra fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        process = _process(record)
        line = super().formatMessage(record)
        origin = "" if process == "MainProcess" else f" process={process}"
        return (
            line + origin + "".join(f" {name}={value}" for name, value in _details(record).items())
        )


def logging_config(settings: LogSettings) -> dict[str, Any]:
    """Logging configuration of this process, as a dictionary for `dictConfig`.

    The engine's processes read the same configuration from a file.
    """
    formatter = JsonFormatter if settings.format == "json" else HumanFormatter
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"coppice": {"()": f"{__name__}.{formatter.__name__}"}},
        "handlers": {
            "coppice": {
                "class": "logging.StreamHandler",
                "formatter": "coppice",
                "stream": "ext://sys.stderr",
            }
        },
        "root": {"handlers": ["coppice"], "level": settings.level.upper()},
        "loggers": {
            "uvicorn": {"handlers": [], "propagate": True, "level": settings.level.upper()},
            # At every configured level.
            "coppice.audit": {"handlers": [], "propagate": True, "level": "INFO"},
            # Requests are counted in the metrics; a line per request would drown other logs.
            "uvicorn.access": {"handlers": [], "propagate": False},
            "vllm": {"handlers": [], "propagate": True, "level": _vllm_level(settings)},
        },
    }


def _vllm_level(settings: LogSettings) -> str:
    """Log level for vLLM's loggers: INFO if the server logs at debug, else ERROR.

    At INFO, vLLM logs its choices in detail, which is only useful for debugging.
    """
    return "INFO" if settings.level == "debug" else "ERROR"


def configure_logging(settings: LogSettings) -> None:
    """Configure the logging of this process and, via environment variables, of vLLM's processes.

    Must be called before vLLM is imported, because the import reads the variables.
    """
    config = logging_config(settings)
    dictConfig(config)
    os.environ.update(
        VLLM_CONFIGURE_LOGGING="1",
        VLLM_LOGGING_LEVEL=_vllm_level(settings),
        VLLM_LOGGING_CONFIG_PATH=str(_write_config_file(config)),
    )


def _write_config_file(config: dict[str, Any]) -> Path:
    """Write the logging configuration to an in-memory file, which vanishes with the server."""
    file = os.memfd_create("coppice-logging")
    os.write(file, json.dumps(config).encode())
    return Path(f"/proc/{os.getpid()}/fd/{file}")
