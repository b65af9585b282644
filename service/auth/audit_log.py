"""A line for every call of an operator's route, allowed or refused: who, from where, what, how it
ended. Logged at every log level, to the logger coppice.audit.
"""

import logging

from starlette.types import Scope

from service.auth.access import declared_access

LOGGER = "coppice.audit"
MAX_LOGGED_CHARS = 128

log = logging.getLogger(LOGGER)


def log_admin_call(scope: Scope, status: int) -> None:
    """Called when the answer has ended; request id and key's name are on every record anyway."""
    access = declared_access(scope.get("endpoint"))
    if access is None or access.role != "admin":
        return
    extra = {"method": scope["method"], "route": scope["route"].path, "status": status}
    if "version" in scope["path_params"]:
        # As the caller wrote it, so it could hold a line break.
        extra["version"] = ascii(scope["path_params"]["version"])[:MAX_LOGGED_CHARS]
    log.info("admin call", extra={**extra, "address": (scope["client"] or ("unknown",))[0]})
