"""A server in its own process whose prompt KV is as large as a real model's.

    python -m bench.harness.kv_server [nixl]

It prints its address and serves until its standard input is closed. It uses the fake engine:
transports are measured, for which only the number of bytes matters, here that of Qwen3-8B, 144 KiB
per token.
"""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import uvicorn
import uvloop

from engine.types.info import EngineInfo
from engine.types.kv import ExportStatus, KvFormat
from service.app import create_app
from service.config.settings import Settings
from service.http.limited_protocol import protocol_with_limits
from tests.fake_engine import FakeEngine, Running

ROOT = Path(__file__).parents[2]
FORMAT = KvFormat(num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16", rope={})
BYTES_PER_TOKEN = 2 * 36 * 8 * 128 * 2


class LargeEngine(FakeEngine):
    @property
    def info(self) -> EngineInfo:
        return replace(super().info, kv_format=FORMAT)

    def _compute_prompt(self, sample: Running) -> None:
        slot = sample.request.export
        if slot is None or sample.computed:
            return
        sample.computed = True
        data = np.random.default_rng(0).bytes(slot.num_tokens * BYTES_PER_TOKEN)
        with slot.arena.open("r+b") as file:
            file.seek(slot.offset)
            file.write(data)
            file.seek(slot.status_offset)
            file.write(ExportStatus.COMMITTED.to_bytes(8, "little"))


@contextmanager
def kv_server(*, nixl: bool = False) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.harness.kv_server"]
    command += ["nixl"] if nixl else []
    with Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(timeout=30)


async def serve(*, nixl: bool) -> None:
    kv = {"capacity_bytes": 2**29, "nixl": nixl}
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.model_validate({"weights": {"directory": folder}, "kv": kv})
        app = create_app(settings, LargeEngine(prompt_kv=True, max_context_tokens=4096))
        config = uvicorn.Config(
            app,
            http=protocol_with_limits(settings.limits),
            port=0,
            log_level="warning",
            access_log=False,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"http://127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    uvloop.run(serve(nixl="nixl" in sys.argv[1:]))
