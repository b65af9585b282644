#!/usr/bin/env bash
# Resolves requirements/{cpu,gpu,dev}.txt again and writes the hashes of all lock files, except
# torch-cpu.txt, which is written by hand. Usage: scripts/lock.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: scripts/lock.sh PYTHON}

"$python" -m pip install --quiet uv==0.13.8

# Text models need no torchvision or similar packages, and their CUDA builds break transformers with
# CPU torch. The other packages are for operating systems other than Linux; colorama is also needed by
# the documentation site, so dev.txt has it.
options=(--quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes)
for package in coppice-client torchvision torchaudio torchcodec \
    pywin32 win32-setctime httpx2-jsfetch; do
    options+=(--no-emit-package "$package")
done

compile() {
    local name=$1
    shift
    echo "lock: requirements/$name.txt"
    "$python" -m uv pip compile "${options[@]}" "$@" --output-file "requirements/$name.txt" >/dev/null
}

# add_hashes NAME: the versions of requirements/NAME.txt are chosen by hand.
add_hashes() {
    local file=requirements/$1.txt pins
    pins=$(mktemp)
    grep -E '^(#|[A-Za-z0-9._-]+==)' "$file" | sed 's/ *\\$//' >"$pins"
    echo "lock: $file"
    {
        grep '^#' "$pins"
        "$python" -m uv pip compile "${options[@]}" --no-deps "$pins"
    } >"$file"
    rm "$pins"
}

# CPU torch is installed from pip's configured find-links, which uv does not read, or from
# PyTorch's index.
links=$("$python" -m pip config get global.find-links 2>/dev/null || true)
compile cpu pyproject.toml requirements/cpu.in requirements/torch-cpu.txt --extra cpu \
    --no-emit-package torch --no-emit-package colorama ${links:+--find-links "$links"} ||
    compile cpu pyproject.toml requirements/cpu.in requirements/torch-cpu.txt --extra cpu \
        --no-emit-package torch --no-emit-package colorama --index-strategy unsafe-best-match \
        --extra-index-url https://download.pytorch.org/whl/cpu
compile gpu pyproject.toml requirements/gpu.in --extra gpu --no-emit-package colorama
compile dev requirements/dev.in --constraint requirements/cpu.txt --constraint requirements/torch-cpu.txt \
    --no-emit-package torch ${links:+--find-links "$links"} # torch's build depends on the device
for name in clients routers ray verl miles verifiers agent_sdk arctic; do add_hashes $name; done
"$python" scripts/dependencies.py
