#!/usr/bin/env bash
# Installs the lock files into .venv, unless it is up to date.
# Usage: scripts/setup.sh serve|dev    Environment: PYTHON (interpreter), DEVICE (cpu or gpu)
#
# .venv/base.stamp records the interpreter, device and path of the environment. If they differ, or an
# installation did not finish, the environment is created again. serve.stamp and dev.stamp record the
# installed lock files. If they differ, that part is updated in place.
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
            "$name" -c 'import sys; print(sys._base_executable)' # the base interpreter, not that of an active venv
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with venv was found${PYTHON:+ at $PYTHON}; install one, or set its path: make PYTHON=/path/to/python3.11"
}

find_device() {
    case ${DEVICE:-} in
    cpu | gpu) echo "$DEVICE" ;;
    '') if nvidia-smi -L 2>/dev/null | grep -q .; then echo gpu; else echo cpu; fi ;;
    *) fail "DEVICE must be cpu or gpu, not '$DEVICE'" ;;
    esac
}

digest() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

stamped() { [[ -f .venv/$1.stamp && $(<".venv/$1.stamp") == "$2" ]]; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# Stamps remain when an interpreter or a package is removed.
sound() {
    .venv/bin/python -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ["coppice", "service", "torch", "uvicorn", "vllm"])))' 2>/dev/null &&
        [[ -x .venv/bin/coppice ]]
}

make_base() {
    say "creating .venv with $1"
    rm -f .venv/base.stamp # first, so that an interrupted removal is not taken for a valid environment
    rm -rf .venv
    mkdir .venv
    touch .venv/unfinished
    "$1" -m venv .venv
    echo "$2" >.venv/base.stamp
}

# install NAME VALUE COMMAND...: runs the command unless the stamp NAME has the value VALUE.
install() {
    local name=$1 value=$2
    shift 2
    if stamped "$name" "$value"; then return; fi
    touch .venv/unfinished
    "$@"
    echo "$value" >".venv/$name.stamp"
    rm .venv/unfinished
}

# Separately, because CPU torch is in pip's configured find-links on some machines, elsewhere only on
# PyTorch's index. First, so that a failed first attempt costs only a lookup.
install_torch() {
    local lock=requirements/torch-cpu.txt
    say "$(grep -o '^torch==[^ ]*' $lock)"
    if ! pip install -qq --no-deps --require-hashes -r $lock 2>/dev/null; then
        pip install -qq --no-deps --require-hashes -r $lock \
            --extra-index-url https://download.pytorch.org/whl/cpu
    fi
}

# Without dependencies: the lock file lists them all, except those that must not be installed.
install_lock() {
    say "$(grep -c '==' "$1") packages of $1; the first installation takes minutes"
    pip install -qq --no-deps --require-hashes -r "$1"
}

install_serve() {
    if [[ $1 == requirements/cpu.txt ]]; then install_torch; fi
    install_lock "$1"
    say "coppice"
    pip install -qq --no-deps --no-build-isolation -e ./client -e .
    if [[ $(uname -m) == x86_64 && ! -f kernels/shared_prefix_attention/libshared_prefix_attention.so ]]; then
        say "no C++ compiler with OpenMP was found: shared-prefix attention is not available on CPU"
    fi
    if [[ ! -f kernels/draft_index/libdraft_index.so ]]; then
        say "no C++ compiler was found: speculation from siblings is not available"
    fi
}

# Version of the compiler. If it changes, the kernels are compiled again.
compiler() { "${CXX:-c++}" --version 2>/dev/null | head -n 1 || true; }

main() {
    exec 9<scripts/setup.sh
    flock 9 # one installation at a time

    local python device lock base
    python=$(find_python)
    device=$(find_device)
    lock=requirements/$device.txt
    base="$("$python" -V) $device $PWD"
    if ! stamped base "$base" || [[ -e .venv/unfinished ]] || ! sound; then
        make_base "$python" "$base"
    fi
    install serve "$(digest "$lock" requirements/torch-cpu.txt pyproject.toml client/pyproject.toml setup.py \
        kernels/*/csrc/*) $(compiler)" install_serve "$lock"
    if [[ $profile == dev ]]; then
        install dev "$(digest requirements/dev.txt)" install_lock requirements/dev.txt
        scripts/tools.sh
    fi
}

main
