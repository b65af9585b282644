"""Training loop of the draft model: waits for samples, trains, publishes checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.drafter.trainer.messages import FromTrainer, Progress, Published, checkpoint_file
from engine.drafter.trainer.model_trainer import ModelTrainer
from engine.drafter.trainer.packing import PackedBatch, pack
from engine.drafter.trainer.replay_buffer import Inbox

MIN_STEPS_BETWEEN_PUBLISHES: Final = 20
"""Minimum number of steps between two published drafters."""
MIN_TOKENS_TO_START: Final = 2048
"""Response tokens received before the first step."""
MAX_EPOCHS: Final = 8
"""Maximum ratio of tokens trained on to tokens received, to bound repetition."""
IDLE_SECONDS: Final = 0.05
CONVERGED_DUTY_CYCLE: Final = 0.2
"""Share of time spent training after convergence.

A busy core slows its neighbors down whatever its priority. Drafters are published less often by the
same factor.
"""
REPORT_INTERVAL_SECONDS: Final = 1.0


class TrainingLoop:
    """Trains a drafter on received samples, and sends progress and new drafters.

    `send` is called on the training thread.
    """

    def __init__(
        self,
        model_trainer: ModelTrainer,
        inbox: Inbox,
        folder: Path,
        send: Callable[[FromTrainer], None],
        *,
        published_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model_trainer = model_trainer
        self._inbox = inbox
        self._folder = folder
        self._send = send
        self._clock = clock
        self._sleep = sleep
        self._published_seconds = published_seconds
        self.num_trained_tokens = 0
        self._published = model_trainer.num_steps
        self._published_at = self._reported_at = clock()

    def run(self) -> None:
        """Train until the input ends, then save a checkpoint."""
        while not self._inbox.ended:
            began = self._clock()
            if not self.run_once():
                self._sleep(IDLE_SECONDS)
            elif self._model_trainer.loss_tracker.has_converged:
                self._idle(self._clock() - began)
        self._model_trainer.save(checkpoint_file(self._folder))

    def _idle(self, trained_seconds: float) -> None:
        until = self._clock() + trained_seconds * (1 / CONVERGED_DUTY_CYCLE - 1)
        while self._clock() < until and not self._inbox.ended:
            self._sleep(IDLE_SECONDS)

    def run_once(self) -> bool:
        """Run a training step if one is due, and return whether one was run."""
        adopted, self._inbox.adopted = self._inbox.adopted, None
        if adopted is not None and adopted.exists():  # deleted if another was promoted meanwhile
            self._model_trainer.adopt(adopted)
            self._model_trainer.save(checkpoint_file(self._folder))
            self._published = self._model_trainer.num_steps
        packed = None if self._inbox.paused else self._next_batch()
        if packed is not None:
            before = self._model_trainer.num_tokens
            self._model_trainer.step(packed)
            self.num_trained_tokens += self._model_trainer.num_tokens - before
        self._report()
        return packed is not None

    def _next_batch(self) -> PackedBatch | None:
        with self._inbox.lock:
            buffer = self._inbox.buffer
            num_received = buffer.num_received
            if (
                num_received < MIN_TOKENS_TO_START
                or self.num_trained_tokens >= MAX_EPOCHS * num_received
            ):
                return None
            return pack(buffer.draw)

    def _report(self) -> None:
        now, model_trainer = self._clock(), self._model_trainer
        if now - self._reported_at >= REPORT_INTERVAL_SECONDS:
            self._reported_at = now
            self._send(
                Progress(
                    num_steps=model_trainer.num_steps,
                    num_tokens=model_trainer.num_tokens,
                    loss=model_trainer.loss_tracker.smoothed,
                )
            )
        share = CONVERGED_DUTY_CYCLE if model_trainer.loss_tracker.has_converged else 1.0
        if (
            now - self._published_at >= self._published_seconds / share
            and model_trainer.num_steps - self._published >= MIN_STEPS_BETWEEN_PUBLISHES
        ):
            self._publish(now)

    def _publish(self, now: float) -> None:
        model_trainer = self._model_trainer
        self._published, self._published_at = model_trainer.num_steps, now
        model_trainer.save(checkpoint_file(self._folder))
        file = self._folder / f"published-{model_trainer.num_steps}.safetensors"
        model_trainer.write_drafter(file)
        self._send(Published(path=str(file), num_steps=model_trainer.num_steps))
