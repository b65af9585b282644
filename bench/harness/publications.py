"""Publications of weights and of adapters to a server, measured by phase."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pybase64
import torch
from safetensors.torch import save, save_file

from bench.harness.delayed_proxy import delayed_proxy
from coppice import Rollouts, WeightsConstraint
from coppice.wire.weights import ActivationMode

LOADED = re.compile(r"loaded the weights of (\S+) in ([0-9.]+) s")
DELTA = "HTTP, delta"
STREAMS = 4
ROUND_TRIP_SECONDS = 0.05
WINDOW_BYTES = 2**22
"""Bytes of a connection that are sent but not acknowledged: the maximum of Linux' tcp_wmem."""
DELAYED = f"HTTP, {1000 * ROUND_TRIP_SECONDS:.0f} ms round trip"
MAX_DELAYED_BYTES = 2**28
"""Size of the largest weights that are uploaded over the delayed connection."""
VLLM = "vLLM's server, reload_weights"
BASE64 = "vLLM's server, base64 in one request"
MAX_BASE64_BYTES = 2**28
"""Size of the largest weights that are sent in base64: many copies of the request exist."""
NUM_RUNNING = 8
RUNNING: Mapping[str, ActivationMode] = {
    f"HTTP, {NUM_RUNNING} samples running": "keep",
    f"HTTP, {NUM_RUNNING} samples running, recompute": "recompute",
}
"""Mode of the activation, by the arm whose samples run meanwhile."""
PROMPT = "Compute 12+34.\n"
MAX_RUNNING_TOKENS = 480
State = Mapping[str, torch.Tensor]
Upload = Callable[[str, State], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Seconds of one publication by phase; `load` is a part of `paused`, that of `activate`.

    `num_continued` is the number of running samples with tokens of both versions.
    """

    upload: float
    activate: float
    paused: float
    load: float
    first_token: float
    num_continued: int = 0

    @property
    def total(self) -> float:
        return self.upload + self.activate + self.first_token


class WeightsPublisher:
    """Publisher of weights to one server, with several ways of upload."""

    def __init__(self, url: str, log: Path, folder: Path, num_bytes: int) -> None:
        self._log = log
        self._folder = folder
        self._num_published = 0
        self._near = Rollouts(url)
        self._resources = ExitStack()
        far_port = self._resources.enter_context(
            delayed_proxy(httpx.URL(url).port or 80, ROUND_TRIP_SECONDS, WINDOW_BYTES)
        )
        self._far = Rollouts(f"http://127.0.0.1:{far_port}")
        self.arms: dict[str, Upload] = {
            **_over_streams("HTTP", self._near),
            DELTA: partial(self._near.upload_weights, delta=True),
            **(_over_streams(DELAYED, self._far) if num_bytes <= MAX_DELAYED_BYTES else {}),
            "shared directory": self._stage,
            **dict.fromkeys(RUNNING, self._near.upload_weights),
        }

    def close(self) -> None:
        for client in (self._near, self._far):
            client.close()
        self._resources.close()

    def publish_next(self, arm: str, state: State, previous: State) -> Publication:
        """Publish weights after others; a delta has the version just before as its base."""
        if arm == DELTA:
            self.publish(arm, previous)
        if arm not in RUNNING:
            return self.publish(arm, state)
        with self._running_samples() as num_continued:
            found = self.publish(arm, state, RUNNING[arm])
        return replace(found, num_continued=sum(num_continued))

    def publish(self, arm: str, state: State, mode: ActivationMode = "keep") -> Publication:
        self._num_published += 1
        label = f"step-{self._num_published}"
        began = time.perf_counter()
        self.arms[arm](label, state)
        uploaded = time.perf_counter()
        answer = self._near.activate_weights(label, mode=mode)
        activated = time.perf_counter()
        self._sample(label)
        return Publication(
            upload=uploaded - began,
            activate=activated - uploaded,
            paused=answer.paused_seconds,
            load=self._load_seconds(label),
            first_token=time.perf_counter() - activated,
        )

    @contextmanager
    def _running_samples(self) -> Iterator[list[int]]:
        """Samples that run meanwhile. The list then has the number of those with two versions."""
        num_continued: list[int] = []
        pending = self._near.submit(
            [PROMPT], n=NUM_RUNNING, max_tokens=MAX_RUNNING_TOKENS, ignore_eos=True
        )
        try:
            while self._near.status().num_samples_running < NUM_RUNNING:
                time.sleep(0.001)
            yield num_continued
        finally:
            result = pending.abort()
        samples = result.groups[0].samples
        num_continued.append(sum(len(sample.versions) > 1 for sample in samples))

    def _stage(self, label: str, state: State) -> None:
        """Without an upload: the safetensors library writes a file that the server reads."""
        path = self._folder / label
        path.mkdir()
        self._delete_directories(path)
        save_file(dict(state), path / "model.safetensors", metadata={"format": "pt"})
        self._near.stage_weights(label, path)

    def _delete_directories(self, keep: Path) -> None:
        """Delete the directories of earlier versions, which are not active any more."""
        for path in self._folder.glob("step-*"):
            if path != keep:
                shutil.rmtree(path)

    def _sample(self, label: str) -> None:
        result = self._near.rollout(
            [PROMPT],
            max_tokens=1,
            weights=WeightsConstraint(min_version=label),
        )
        assert result.groups[0].samples[0].versions[0].version == label

    def _load_seconds(self, label: str) -> float:
        found = dict(LOADED.findall(self._log.read_text()))
        return float(found[label])


def _over_streams(arm: str, client: Rollouts) -> dict[str, Upload]:
    """Uploads over one connection and over several."""
    return {
        arm: client.upload_weights,
        f"{arm}, {STREAMS} streams": partial(client.upload_weights, streams=STREAMS),
    }


class VllmPublisher:
    """Publisher to vLLM's server, whose transfer of weights between processes needs a GPU.

    Either the safetensors library writes a file that vLLM's `reload_weights` loads, or all tensors
    are sent in base64 in one JSON request, as to SGLang's `update_weights_from_tensor`.
    """

    def __init__(self, url: str, model: Path, num_bytes: int) -> None:
        self._model = model
        self._http = httpx.Client(base_url=url, timeout=300)
        self.arms: dict[str, Callable[[State], Publication]] = {VLLM: self._publish_file}
        if num_bytes <= MAX_BASE64_BYTES:
            self.arms[BASE64] = self._publish_request

    def close(self) -> None:
        self._http.close()

    def publish(self, arm: str, state: State) -> Publication:
        return self.arms[arm](state)

    def _publish_file(self, state: State) -> Publication:
        began = time.perf_counter()
        save_file(dict(state), self._model / "model.safetensors", metadata={"format": "pt"})
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._model)}}
        return self._load(began, call)

    def _publish_request(self, state: State) -> Publication:
        began = time.perf_counter()
        tensors = pybase64.b64encode(save(dict(state)))
        call = b'{"method": "receive_base64", "args": ["%b"]}' % tensors
        self._post("/collective_rpc", content=call)
        return self._load(began, {"method": "load_received"})

    def _load(self, began: float, call: Mapping[str, object]) -> Publication:
        uploaded = time.perf_counter()
        self._post("/pause", params={"mode": "wait"})  # clears the caches, too
        paused = time.perf_counter()
        [load_seconds] = self._post("/collective_rpc", json=call).json()["results"]
        loaded = time.perf_counter()
        self._post("/resume")
        activated = time.perf_counter()
        self._post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        return Publication(
            upload=uploaded - began,
            activate=activated - uploaded,
            paused=activated - paused,
            load=loaded - paused if load_seconds is None else float(load_seconds),
            first_token=time.perf_counter() - activated,
        )

    def _post(self, route: str, **options: Any) -> httpx.Response:
        return self._http.post(route, **options).raise_for_status()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPublication:
    """Seconds until a LoRA adapter is loaded, and until a sample has used it. Nothing is paused."""

    load: float
    first_token: float


class AdapterPublisher:
    """Publisher of a LoRA adapter's versions, by an upload or from a directory."""

    def __init__(self, url: str, adapter: Path) -> None:
        self._client = Rollouts(url)
        self._num_published = 0
        self.arms: dict[str, Callable[[str], object]] = {
            "adapter, HTTP": lambda version: self._client.publish_adapter(
                "bench", version, adapter
            ),
            "adapter, shared directory": lambda version: self._client.load_adapter(
                "bench", adapter, version=version
            ),
        }

    def close(self) -> None:
        self._client.close()

    def publish(self, arm: str) -> AdapterPublication:
        self._num_published += 1
        version = f"{self._num_published}"
        began = time.perf_counter()
        self.arms[arm](version)
        loaded = time.perf_counter()
        self._client.rollout([PROMPT], max_tokens=1, adapter=f"bench@{version}")
        return AdapterPublication(load=loaded - began, first_token=time.perf_counter() - loaded)
