#!/usr/bin/env bash
# Makes .NAME hold what requirements/NAME.txt pins; nothing when it already does. It lies beside .venv
# and sees it, so that it cannot disturb its lock.
#   clients   other people's clients, which tests run
#   verl      verl and Ray, and miles: more of them, which `make soak` runs
#   miles
#   arctic    what drafts are compared with; compiled, which wants a torch of its own for minutes
# Usage: scripts/beside.sh NAME PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: scripts/beside.sh NAME PYTHON}
python=${2:?usage: scripts/beside.sh NAME PYTHON}
lock=requirements/$name.txt

main() {
    exec 9<scripts/beside.sh
    flock 9 # one install at a time

    local wanted
    wanted="$(sha256sum <"$lock") $("$python" -V)"
    if [[ -f .$name/stamp && $(<".$name/stamp") == "$wanted" ]]; then return; fi
    rm -rf ".$name"
    echo "install: $lock, into .$name" >&2
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --target ".$name" -r "$lock"
    echo "$wanted" >".$name/stamp"
}

main
