"""Conversion of a task group's exceptions to the one error that callers get."""

import logging

from engine.errors import EngineDead, RequestRefused
from service.http.errors import EngineGone, Internal, InvalidRequest, ServiceError

log = logging.getLogger(__name__)

ENGINE_RETRY_SECONDS = 30.0


def to_service_error(failures: BaseExceptionGroup[BaseException]) -> ServiceError:
    """The error for the first exception of the group.

    An unexpected exception is logged and reported as Internal, without details.
    """
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    match first:
        case ServiceError():
            return first
        case EngineDead():
            return EngineGone(retry_after_seconds=ENGINE_RETRY_SECONDS)
        case RequestRefused():
            return InvalidRequest(str(first))
    log.error("unexpected error", exc_info=failures)
    return Internal()
