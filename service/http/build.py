"""Construction of the objects that all routes share: request threads and body reader."""

from dataclasses import dataclass

from service.config.limits import LimitsSettings
from service.fair_threads import FairThreads
from service.http.bodies import Bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """Threads in which large requests and responses are converted, and the reader of bodies."""

    threads: FairThreads
    bodies: Bodies


def build_http(limits: LimitsSettings) -> Http:
    num_bytes = limits.max_body_bytes
    threads = FairThreads("requests", key_bytes=2 * num_bytes, total_bytes=4 * num_bytes)
    return Http(threads=threads, bodies=Bodies(limits, threads))
