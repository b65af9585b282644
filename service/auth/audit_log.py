"""Audit log of all calls of admin routes, allowed or refused.

A record holds the key's name, the client's address, the route and the status. Records go to the
logger coppice.audit at every log level.
"""

import logging

from starlette.types import Scope

from service.auth.access import declared_access

LOGGER = "coppice.audit"
MAX_LOGGED_CHARS = 128

log = logging.getLogger(LOGGER)


def log_admin_call(scope: Scope, status: int) -> None:
    """Write the audit record of a request if its route requires the role admin.

    Called once the response has ended. The logging context adds the request id and the key's name
    to every record.
    """
    access = declared_access(scope.get("endpoint"))
    if access is None or access.role != "admin":
        return
    extra = {"method": scope["method"], "route": scope["route"].path, "status": status}
    if "version" in scope["path_params"]:
        # Unvalidated input, which could hold a line break.
        extra["version"] = ascii(scope["path_params"]["version"])[:MAX_LOGGED_CHARS]
    log.info("admin call", extra={**extra, "address": (scope["client"] or ("unknown",))[0]})
