#!/usr/bin/env bash
# Makes .venv hold what the lock files say; does nothing when it already does.
# Usage: scripts/setup.sh serve|dev    Environment: PYTHON (interpreter), DEVICE (cpu or gpu)
#
# .venv/base.stamp says what the environment was made for; another value, or an install that did not
# finish, and it is made anew. serve.stamp and dev.stamp say which lock files it holds; another value,
# and that part is brought up to date in place.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${1:?usage: scripts/setup.sh serve|dev}

say() { echo "install: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

runs() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if runs "$name"; then
            "$name" -c 'import sys; print(sys._base_executable)' # not of a venv that is active
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with venv was found${PYTHON:+ at $PYTHON}; install one, or name it: make PYTHON=/path/to/python3.11"
}

find_device() {
    case ${DEVICE:-} in
    cpu | gpu) echo "$DEVICE" ;;
    '') if nvidia-smi -L 2>/dev/null | grep -q .; then echo gpu; else echo cpu; fi ;;
    *) fail "DEVICE is cpu or gpu, not '$DEVICE'" ;;
    esac
}

digest() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

stamped() { [[ -f .venv/$1.stamp && $(<".venv/$1.stamp") == "$2" ]]; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# Stamps stay behind when an interpreter or a package goes.
sound() {
    .venv/bin/python -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ["coppice", "service", "torch", "uvicorn", "vllm"])))' 2>/dev/null &&
        [[ -x .venv/bin/coppice ]]
}

make_base() {
    say "making .venv with $1"
    rm -f .venv/base.stamp # first, lest an interrupted removal passes for an environment
    rm -rf .venv
    mkdir .venv
    touch .venv/unfinished
    "$1" -m venv .venv
    echo "$2" >.venv/base.stamp
}

# install NAME VALUE COMMAND...: runs the command unless the stamp says that it has been done.
install() {
    local name=$1 value=$2
    shift 2
    if stamped "$name" "$value"; then return; fi
    touch .venv/unfinished
    "$@"
    echo "$value" >".venv/$name.stamp"
    rm .venv/unfinished
}

# On its own and first, so that the second try costs no more than a look. CPU torch is in pip's own
# find-links on some machines, elsewhere only on PyTorch's index.
install_torch() {
    local torch
    torch=$(grep '^torch==' "$1")
    say "$torch"
    if [[ $torch != *+cpu ]]; then
        pip install -qq --no-deps "$torch"
    elif ! pip install -qq --no-deps "$torch" 2>/dev/null; then
        pip install -qq --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
    fi
}

# Without dependencies: the lock names them all, except those that must not come.
install_lock() {
    say "$(grep -c '==' "$1") packages of $1; the first time takes minutes"
    pip install -qq --no-deps -r "$1"
}

install_serve() {
    install_torch "$1"
    install_lock "$1"
    say "coppice"
    pip install -qq --no-deps --no-build-isolation -e ./client -e .
    if [[ $(uname -m) == x86_64 && ! -f kernels/shared_prefix_attention/libshared_prefix_attention.so ]]; then
        say "no C++ compiler with OpenMP was found: attention does not share prefixes on CPUs"
    fi
    if [[ ! -f kernels/draft_index/libdraft_index.so ]]; then
        say "no C++ compiler was found: nothing can be drafted from siblings"
    fi
}

# What compiles the kernels; another one, or the first one, and they are compiled anew.
compiler() { "${CXX:-c++}" --version 2>/dev/null | head -n 1 || true; }

main() {
    exec 9<scripts/setup.sh
    flock 9 # one install at a time

    local python device lock base
    python=$(find_python)
    device=$(find_device)
    lock=requirements/$device.txt
    base="$("$python" -V) $device $PWD"
    if ! stamped base "$base" || [[ -e .venv/unfinished ]] || ! sound; then
        make_base "$python" "$base"
    fi
    install serve "$(digest "$lock" pyproject.toml client/pyproject.toml setup.py \
        kernels/*/csrc/*) $(compiler)" install_serve "$lock"
    if [[ $profile == dev ]]; then
        install dev "$(digest requirements/dev.txt)" install_lock requirements/dev.txt
        scripts/tools.sh
    fi
}

main
