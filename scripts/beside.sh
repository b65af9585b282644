#!/usr/bin/env bash
# Installs requirements/NAME.txt into the environment .NAME, unless it is up to date. The environment
# is separate from .venv and can import its packages, so it does not change .venv's locked versions.
#   clients   third-party clients that tests use
#   verl      verl and Ray, which `make soak` uses
#   miles     miles, which `make soak` uses
#   arctic    baseline of the speculation benchmarks; compiling it takes minutes and a separate torch
# Usage: scripts/beside.sh NAME PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: scripts/beside.sh NAME PYTHON}
python=${2:?usage: scripts/beside.sh NAME PYTHON}
lock=requirements/$name.txt

main() {
    exec 9<scripts/beside.sh
    flock 9 # one installation at a time

    local wanted
    wanted="$(sha256sum <"$lock") $("$python" -V)"
    if [[ -f .$name/stamp && $(<".$name/stamp") == "$wanted" ]]; then return; fi
    rm -rf ".$name"
    echo "install: $lock, into .$name" >&2
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
        --target ".$name" -r "$lock"
    echo "$wanted" >".$name/stamp"
}

main
