"""This project's server with the null executor: `python -m bench.harness.host_path.null_server`.

Its arguments are those of `python -m service`. `vllm serve` takes the executor as an option. This
server's settings name executors that compute only.
"""

import sys


def use_null_executor() -> None:
    """Let vLLM use the null executor in engines that this process starts."""
    from vllm.v1.executor.abstract import Executor

    from bench.harness.host_path.null_executor import NullExecutor

    Executor.get_class = staticmethod(lambda vllm_config: NullExecutor)


def main() -> None:
    from service.cli import run
    from service.serve_components import ServeComponents, exit_process

    use_null_executor()
    run(sys.argv[1:], ServeComponents(exit_process=exit_process))


if __name__ == "__main__":
    main()
