"""Lifecycle state of the server, and the checks of it by health probes and routes."""

from typing import Literal

from engine.protocol.info_and_health import EngineState
from engine.types.info import EngineHealth
from service.errors import DRAINING_RETRY_SECONDS, Draining, EngineGone, NotReady

ReplicaState = Literal["starting", "serving", "draining"]
STARTING_RETRY_SECONDS = 2.0
WEIGHTS_RETRY_SECONDS = 2.0


def starting(health: EngineHealth) -> NotReady:
    """Error of a request during the start, with its current phase, if it is known."""
    phase = "" if health.start_phase is None else f": {health.start_phase}"
    return NotReady(f"the model is loading{phase}", retry_after_seconds=STARTING_RETRY_SECONDS)


class Readiness:
    """Lifecycle state of the server, with the checks that health probes and routes call.

    `started`: the model is loaded. `caught_up`: the weights version that the cluster serves is
    active too. `draining`: admission is closed. The server sets each flag once.
    """

    def __init__(self, engine: EngineState) -> None:
        self.started = False
        self.caught_up = False
        self.draining = False
        self._engine = engine

    @property
    def state(self) -> ReplicaState:
        if self.draining:
            return "draining"
        return "serving" if self.caught_up else "starting"

    def check_ready(self) -> None:
        """Raise an error if the server cannot serve a new request now."""
        if self.draining:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)
        self.check_serving()

    def check_serving(self) -> None:
        """Raise an error if the server cannot serve requests that were admitted before a drain."""
        self.check_started()
        if not self.caught_up:
            raise NotReady(
                "the weights version of the cluster is not loaded yet",
                retry_after_seconds=WEIGHTS_RETRY_SECONDS,
            )

    def check_started(self) -> None:
        """Raise an error if the model is not loaded or the engine is dead.

        Does not require `caught_up`: a restart would not fetch the weights sooner.
        """
        health = self._engine.health()
        if health.stage == "dead" or (self.started and not health.alive):
            raise EngineGone(retry_after_seconds=30)
        if not self.started:
            raise starting(health)

    def check_alive(self) -> EngineHealth:
        health = self._engine.health()
        if not health.alive:
            # The reason of a failed start may hold a path, so it is only logged.
            raise EngineGone(health.reason if self.started else "the engine did not start")
        return health
