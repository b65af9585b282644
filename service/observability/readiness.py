"""Whether a server can be sent requests now, and whether a restart would help it."""

from engine.protocol import Engine, EngineHealth
from service.cluster.registry import ReplicaState
from service.http.errors import Draining, EngineGone, NotReady
from service.rollouts.admission import DRAINING_RETRY_SECONDS

STARTING_RETRY_SECONDS = 2.0
WEIGHTS_RETRY_SECONDS = 2.0


class Readiness:
    """`started`: the model is there; `caught_up`: and so are the weights that the fleet serves;
    `draining`: nothing new is taken. Written by the server, each of them once.
    """

    def __init__(self, engine: Engine) -> None:
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
        """Raises the problem for which a new request cannot be served now."""
        if self.draining:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)
        self.check_serving()

    def check_serving(self) -> None:
        """As above, for what serves the requests that were taken before a drain."""
        self.check_started()
        if not self.caught_up:
            raise NotReady(
                "the weights are not here yet", retry_after_seconds=WEIGHTS_RETRY_SECONDS
            )

    def check_started(self) -> None:
        """Raises the problem for which the model is not there. What it then waits for, it does not
        get sooner by being started again."""
        health = self._engine.health()
        if health.stage == "dead" or (self.started and not health.alive):
            raise EngineGone(retry_after_seconds=30)
        if not self.started:
            raise NotReady("the model is loading", retry_after_seconds=STARTING_RETRY_SECONDS)

    def check_alive(self) -> EngineHealth:
        health = self._engine.health()
        if not health.alive:
            # Why it did not start may name a path: that is for the log.
            raise EngineGone(health.reason if self.started else "the engine did not start")
        return health
