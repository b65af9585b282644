#!/usr/bin/env bash
# Runs all benchmarks sequentially, after making the models that some of them need. Takes hours.
# Usage: scripts/bench.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: scripts/bench.sh PYTHON}

main() {
    make_models
    scripts/beside.sh arctic "$python"
    for file in bench/[!_]*.py; do
        local name
        name=$(basename "$file" .py)
        case $name in
            speculation) compare_speculation ;;
            cross_context) bench "$name" --model build/100m --agents build/agents ;;
            shared_prefix_kernel)
                bench "$name"
                COPPICE_SHARED_PREFIX_ISA=avx2 bench "$name" ;;
            *_gpu) if nvidia-smi -L >/dev/null 2>&1; then bench "$name" --out bench/records/gpu; fi ;;
            *) bench "$name" ;;
        esac
    done
    "$python" -m bench.report.benchmarks_page
    "$python" -m bench.report.performance_page
}

bench() {
    echo "bench: $*" >&2
    "$python" -m "bench.$1" "${@:2}"
}

compare_speculation() {
    bench speculation guard --rounds 15
    for temperature in 1.0 0.6; do
        bench speculation workload build/100m --temperature $temperature --arctic .arctic
    done
}

make_models() {
    for size in 25m 100m; do
        made "build/$size" examples.seedling.enlarge --to $size
    done
    made build/agents examples.seedling.train_agents
    made build/drafter/fitted examples.seedling.drafter
    made build/drafter/other bench.harness.policy_shift
}

made() {
    if [[ ! -d $1 ]]; then "$python" -m "$2" "${@:3}" --out "$1"; fi
}

main
