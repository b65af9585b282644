#!/usr/bin/env bash
# Installs requirements/NAME.txt into the environment .NAME, unless it is up to date. The environment
# is separate from .venv and can import its packages, so it does not change .venv's locked versions.
# A NAME with requirements/NAME/package-lock.json is installed with npm.
#   clients   third-party clients that tests use
#   routers   third-party routers that tests put in front of replicas
#   ray       Ray, which `make soak` uses for the ranks of an engine
#   verl      verl and Ray, which `make soak` uses
#   verifiers verifiers, which `make soak` uses
#   miles     miles, which `make soak` uses
#   agent_sdk Claude's agent SDK, which `make soak` uses
#   codex_cli OpenAI's Codex CLI, which `make soak` uses
#   arctic    baseline of the speculation benchmarks; compiling it takes minutes and a separate torch
# Usage: scripts/beside.sh NAME PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: scripts/beside.sh NAME PYTHON}
python=${2:?usage: scripts/beside.sh NAME PYTHON}
lock=requirements/$name.txt
if [[ -d requirements/$name ]]; then lock=requirements/$name/package-lock.json; fi

install_txt() {
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
        --target ".$name" -r "$lock"
}

install_json() {
    mkdir ".$name"
    cp "$(dirname "$lock")/package.json" "$lock" ".$name"
    npm ci --prefix ".$name" --ignore-scripts --no-audit --no-fund --loglevel=error >&2
}

main() {
    exec 9<scripts/beside.sh
    flock 9 # one installation at a time

    local wanted
    wanted="$(sha256sum <"$lock") $("$python" -V)"
    if [[ -f .$name/stamp && $(<".$name/stamp") == "$wanted" ]]; then return; fi
    rm -rf ".$name"
    echo "install: $lock, into .$name" >&2
    "install_${lock##*.}"
    echo "$wanted" >".$name/stamp"
}

main
