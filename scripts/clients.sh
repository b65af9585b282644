#!/usr/bin/env bash
# Makes .clients hold the clients that requirements/clients.txt pins; nothing when it already does.
# They lie beside .venv and see it, so that none of them can disturb its lock.
# Usage: scripts/clients.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: scripts/clients.sh PYTHON}
lock=requirements/clients.txt

main() {
    exec 9<scripts/clients.sh
    flock 9 # one install at a time

    local wanted
    wanted="$(sha256sum <"$lock") $("$python" -V)"
    if [[ -f .clients/stamp && $(<.clients/stamp) == "$wanted" ]]; then return; fi
    rm -rf .clients
    echo "install: the clients of $lock" >&2
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --target .clients -r "$lock"
    echo "$wanted" >.clients/stamp
}

main
