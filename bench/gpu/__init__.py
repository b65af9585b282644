"""Measurements of one visit to a GPU host, in two parts, and the decisions that follow from them.

    python -m bench.gpu --part a --limit 230 --work DIRECTORY --out DIRECTORY
    python -m bench.gpu --part b --limit 430 --work DIRECTORY --out DIRECTORY
    python -m bench.gpu --rehearse --out DIRECTORY
    python -m bench.gpu.report DIRECTORY

Part a writes the models, times kernels and copies on a quiet GPU, stores the attention crossover,
and runs GPU tests beside a start that compiles. Part b runs six engines that take turns, a pause
of 8B parameters, and the tests of CUDA graphs. Run b on the same host: it uses what a has left in
the working folder, which needs 25 GB and is best in memory, such as /dev/shm/gpu.

Nothing needs to be installed and no registry is reached. Put torch, vLLM and their dependencies on
PYTHONPATH, with an entry point `coppice = engine.launch.plugin:install` of `vllm.general_plugins`.

On a host that is left after each call, the calls are, with the host's own script for PYTHONPATH:

    . ./environment && python3 -m bench.gpu --part a --limit 230 --work /dev/shm/gpu --out "$OUT"
    . ./environment && python3 -m bench.gpu --part b --limit 430 --work /dev/shm/gpu --out "$OUT"

Each module runs in a session of its own and is killed at its limit. One that fails does not stop
the others. Results are written after each measurement. Unpack the folders of both parts into one,
and `bench.gpu.report` writes `report.md`, a table of decisions, and `run-N.json`, the record that
`bench/records/gpu` is for.
"""
