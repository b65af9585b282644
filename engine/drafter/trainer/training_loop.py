"""Training as long as there is something to learn; what is made is published now and then."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.drafter.trainer.inbox import Ears
from engine.drafter.trainer.messages import Progress, Published, Tells, checkpoint_file
from engine.drafter.trainer.model_trainer import Learner
from engine.drafter.trainer.packing import Packed, pack

LEAST_STEPS: Final = 20
"""Between two drafters that are published."""
LEAST_TOKENS: Final = 2048
"""Heard before the first step."""
MOST_PASSES: Final = 8
"""Tokens learned from, over tokens heard: what is known by heart is not gone over for ever."""
WAITED_SECONDS: Final = 0.05
SETTLED_SHARE: Final = 0.2
"""Of the time, for training, once there is little to learn: a processor that computes slows its
neighbours down, whatever its priority. Drafters are published that much more rarely too."""
TOLD_SECONDS: Final = 1.0


class Trainer:
    """`tell` is called on the thread that trains."""

    def __init__(
        self,
        learner: Learner,
        ears: Ears,
        folder: Path,
        tell: Callable[[Tells], None],
        *,
        published_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._learner = learner
        self._ears = ears
        self._folder = folder
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._published_seconds = published_seconds
        self.num_learned = 0
        self._published = learner.num_steps
        self._published_at = self._told_at = clock()

    def run(self) -> None:
        """Until there is no more to hear; what was trained since the last time is kept then."""
        while not self._ears.ended:
            began = self._clock()
            if not self.turn():
                self._sleep(WAITED_SECONDS)
            elif self._learner.course.is_settled:
                self._rest(self._clock() - began)
        self._learner.save(checkpoint_file(self._folder))

    def _rest(self, trained_seconds: float) -> None:
        until = self._clock() + trained_seconds * (1 / SETTLED_SHARE - 1)
        while self._clock() < until and not self._ears.ended:
            self._sleep(WAITED_SECONDS)

    def turn(self) -> bool:
        """One step of training, if it is time for one."""
        adopted, self._ears.adopted = self._ears.adopted, None
        if adopted is not None and adopted.exists():  # or another was promoted meanwhile
            self._learner.adopt(adopted)
            self._learner.save(checkpoint_file(self._folder))
            self._published = self._learner.num_steps
        packed = None if self._ears.paused else self._row()
        if packed is not None:
            before = self._learner.num_tokens
            self._learner.step(packed)
            self.num_learned += self._learner.num_tokens - before
        self._report()
        return packed is not None

    def _row(self) -> Packed | None:
        with self._ears.lock:
            buffer = self._ears.buffer
            heard = buffer.num_received
            if heard < LEAST_TOKENS or self.num_learned >= MOST_PASSES * heard:
                return None
            return pack(buffer.draw)

    def _report(self) -> None:
        now, learner = self._clock(), self._learner
        if now - self._told_at >= TOLD_SECONDS:
            self._told_at = now
            self._tell(
                Progress(
                    num_steps=learner.num_steps,
                    num_tokens=learner.num_tokens,
                    loss=learner.course.late,
                )
            )
        share = SETTLED_SHARE if learner.course.is_settled else 1.0
        if (
            now - self._published_at >= self._published_seconds / share
            and learner.num_steps - self._published >= LEAST_STEPS
        ):
            self._publish(now)

    def _publish(self, now: float) -> None:
        learner = self._learner
        self._published, self._published_at = learner.num_steps, now
        learner.save(checkpoint_file(self._folder))
        file = self._folder / f"published-{learner.num_steps}.safetensors"
        learner.write_drafter(file)
        self._tell(Published(path=str(file), num_steps=learner.num_steps))
