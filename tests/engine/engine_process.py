"""A process with an engine in it: reports its PIDs, then generates until it is interrupted.

    python -m tests.engine.engine_process MAX_TOKENS NUM_ENGINES

Ctrl-C lets the running sample finish, as in the service, and then stops the engine.
"""

import asyncio
import json
import os
import signal
import sys

import psutil

from engine.types.samples import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import settings


async def main(max_tokens: int, num_engines: int) -> None:
    told_off = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, told_off.set)
    engine = VllmEngine(settings(data_parallel_size=num_engines))
    await engine.start("v0")
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    (pending,) = await engine.submit(
        [SampleRequest(id="one", prompt_token_ids=[1, 2, 3], sampling=sampling)]
    )
    report(children=[child.pid for child in psutil.Process().children(recursive=True)])
    await told_off.wait()
    completion = await pending
    await engine.stop()
    report(num_tokens=len(completion.token_ids), finish=completion.finish, pid=os.getpid())


def report(**info: object) -> None:
    print(json.dumps(info), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
