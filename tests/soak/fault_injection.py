"""Faults injected into a running cluster one after the other, and its recovery.

As an orchestrator does, it watches the probes of the replicas and restarts dead ones.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.invariants.service_process import until
from tests.redis_server import RedisServer
from tests.soak.cluster_load import FleetLoad
from tests.soak.cluster_model import FleetModel
from tests.soak.replicas import Replica

PAUSE_SECONDS = 3.0
MAX_ACTIVATIONS = 20
DETECTION_SECONDS = 40.0
SHARED = Path("/dev/shm")


class FaultInjector:
    """Injects faults; `done` counts them.

    `own_memory`: no other process uses the shared memory, so it can be filled. The seconds are
    those of every drain, and those until the probe reported a dead engine.
    """

    def __init__(
        self,
        model: FleetModel,
        redis: RedisServer,
        fleet: Sequence[Replica],
        load: FleetLoad,
        *,
        own_memory: bool,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.drain_seconds: list[float] = []
        self.noticed_seconds: list[float] = []
        self.num_versions = 0
        self._model = model
        self._redis = redis
        self._fleet = fleet
        self._load = load
        self._own_memory = own_memory
        self._random = random.Random(3)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for name, inflict in self._kinds().items():
                print(f"{time.strftime('%X')} {name}", flush=True)
                inflict()
                self.done[name] += 1
                self._publish()
                time.sleep(1)

    def _kinds(self) -> dict[str, Callable[[], None]]:
        return {
            "Redis killed and restarted (SIGKILL)": self._kill_redis,
            "Redis suspended (SIGSTOP)": self._pause_redis,
            "Redis emptied": self._redis.flush,
            "a replica killed and restarted (SIGKILL)": self._kill_replica,
            "a replica killed while it loads weights, and restarted (SIGKILL)": self._kill_loading,
            "a replica suspended (SIGSTOP)": self._pause_replica,
            **(self._kinds_of_engine() if self._fleet[-1].processes("EngineCore") else {}),
            **({"shared memory full": self._fill_shared_memory} if self._own_memory else {}),
            **self._kinds_of_trainer(),
            "all replicas restarted one by one (SIGTERM)": self._roll_all,
        }

    def _kinds_of_trainer(self) -> dict[str, Callable[[], None]]:
        """Trainers that die in a phase of an update, and a replica that dies in one."""
        return {
            "a trainer gone after a pause": lambda: self._abandon(("pause", {})),
            "a trainer gone after a sleep": lambda: self._abandon(("sleep", {"level": 2})),
            "a trainer gone after a wake of the weights": lambda: self._abandon(
                ("sleep", {"level": 2}), ("wake", {"tags": ["weights"]})
            ),
            "a sleeping replica killed and restarted (SIGKILL)": self._kill_sleeping_replica,
        }

    def _abandon(self, *calls: tuple[str, dict[str, object]]) -> None:
        """Makes a trainer's calls without those that would follow; the lease ends their effect."""
        replica = self._random.choice(self._fleet)
        for name, body in calls:
            lease = {} if name == "wake" else {"lease_seconds": PAUSE_SECONDS}
            _call(replica, name, {**body, **lease})
        until(lambda: not replica.status()["paused"], seconds=60, what="the lease ends")

    def _kill_sleeping_replica(self) -> None:
        replica = self._random.choice(self._fleet)
        _call(replica, "sleep", {"level": 2, "lease_seconds": None})
        replica.kill()
        replica.start()

    def _kinds_of_engine(self) -> dict[str, Callable[[], None]]:
        return {
            "an EngineCore killed (SIGKILL)": self._kill_core,
            "one of two workers killed (SIGKILL)": self._kill_worker,
            "an EngineCore suspended (SIGSTOP)": self._stop_core,
        }

    def _kill_redis(self) -> None:
        self._redis.kill()
        time.sleep(PAUSE_SECONDS)
        self._redis.start()

    def _pause_redis(self) -> None:
        self._redis.pause()
        time.sleep(PAUSE_SECONDS)
        self._redis.resume()

    def _kill_replica(self) -> None:
        replica = self._random.choice(self._fleet)
        replica.kill()
        time.sleep(1)
        replica.start()

    def _kill_loading(self) -> None:
        """Kills a replica while it loads a version that another one activates on all replicas."""
        victim, other, _ = self._random.sample(self._fleet, 3)
        for _ in range(MAX_ACTIVATIONS):
            address = self._upload(other)
            with ThreadPoolExecutor(1) as threads:
                activation = threads.submit(self._activate, other, address)
                was_loading = _kill_in_load(victim, activation)
            if was_loading:
                break
        assert was_loading, "no load was observed"
        victim.start()

    def _pause_replica(self) -> None:
        self._random.choice(self._fleet).pause(PAUSE_SECONDS)

    def _kill_core(self) -> None:
        replica = self._random.choice(self._fleet)
        replica.processes("EngineCore")[0].kill()
        self._revive(replica)

    def _kill_worker(self) -> None:
        replica = self._fleet[-1]
        replica.processes("Worker")[-1].kill()
        self._revive(replica)

    def _stop_core(self) -> None:
        replica = self._random.choice(self._fleet)
        replica.processes("EngineCore")[0].send_signal(signal.SIGSTOP)
        self._revive(replica)

    def _fill_shared_memory(self) -> None:
        """Fills the shared memory.

        A replica that starts in the meantime serves without handles, or exits with an error; a
        running one has its own pages, but messages between vLLM's ranks may need new pages.
        """
        first, *others = self._fleet
        with _fill_mount(SHARED) as fill:
            time.sleep(PAUSE_SECONDS)
            self.drain_seconds.append(first.stop())
            fill()  # the space that its arena has left free
            serves = first.starts()
            assert not (serves and _capacity(first))
        for replica in others:
            if not replica.passes("livez"):
                self._revive(replica)
        if serves:
            self.drain_seconds.append(first.stop())
        first.start()
        assert _capacity(first)

    def _roll_all(self) -> None:
        for replica in self._fleet:
            self._roll(replica)

    def _roll(self, replica: Replica) -> None:
        self.drain_seconds.append(replica.stop())
        replica.start()

    def _revive(self, replica: Replica) -> None:
        began = time.monotonic()
        until(
            lambda: not replica.passes("livez"),
            seconds=DETECTION_SECONDS,
            what="a death is noticed",
        )
        self.noticed_seconds.append(time.monotonic() - began)
        replica.stop()
        replica.start()

    def _publish(self) -> None:
        """Sends a new version to one replica; groups with an exact version get an error."""
        replica = self._random.choice(self._fleet)
        self._activate(replica, self._upload(replica))
        label = f"v{self.num_versions}"
        until(lambda: self._all_serve(label), seconds=60, what="all serve what was ordered")
        self._load.version = self.num_versions

    def _upload(self, replica: Replica) -> str:
        """Uploads a new version; returns its address."""
        self.num_versions += 1
        address = f"{replica.url}/v1/weights/v{self.num_versions}"
        put = httpx.put(address, content=self._model.weights(self.num_versions), timeout=60)
        assert put.status_code == 201, put.text + replica.errors()
        return address

    def _activate(self, replica: Replica, address: str) -> None:
        activated = httpx.post(f"{address}/activate", json={}, timeout=120)
        assert activated.status_code == 200, activated.text + replica.errors()

    def _all_serve(self, label: str) -> bool:
        with suppress(httpx.TransportError):
            return all(one.status()["weights_version"] == label for one in self._fleet)
        return False


def _call(replica: Replica, name: str, body: dict[str, object]) -> None:
    answer = httpx.post(f"{replica.url}/v1/{name}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text + replica.errors()


def _kill_in_load(replica: Replica, activation: Future[None]) -> bool:
    """Kills a replica once it loads weights; False if the activation ends before that is seen."""
    while not activation.done():
        if replica.status()["stage"] == "activating":
            replica.kill()
            activation.result()  # the other replicas do not wait for ever
            return True
    activation.result()
    return False


def _capacity(replica: Replica) -> int:
    kv = replica.status()["kv"]
    assert isinstance(kv, dict)
    capacity: int = kv["capacity_bytes"]
    return capacity


@contextmanager
def _fill_mount(folder: Path) -> Iterator[Callable[[], None]]:
    """Fills the mount completely. The yielded function fills space that has become free since."""
    file = folder / "full"

    def fill() -> None:
        with file.open("ab", buffering=0) as filling, suppress(OSError):
            while filling.write(bytes(2**12)):
                pass

    try:
        fill()
        yield fill
    finally:
        file.unlink()
