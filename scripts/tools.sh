#!/usr/bin/env bash
# Puts the programs that tests run beside ours into .venv/tools: Prometheus for the rules, Redis for the
# directory, nginx for what stands in front. From Debian's packages, unpacked and not installed, so that
# it needs no root. Does nothing for what is there already, or on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.venv/tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
own_lists=()

say() { echo "install: $*" >&2; }

there() {
    local program
    for program in "$@"; do
        if ! [[ -x $tools/usr/bin/$program || -x $tools/usr/sbin/$program ]] &&
            ! command -v "$program" >/dev/null; then return 1; fi
    done
}

download() { (cd "$work/debs" && apt-get -qq ${own_lists[@]+"${own_lists[@]}"} download "$@"); }

# Where the system's lists are old or missing, lists of our own are fetched, once.
download_with_own_lists() {
    if [[ -z ${own_lists[*]-} ]]; then
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
        own_lists=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1)
        apt-get -qq "${own_lists[@]}" update || return
    fi
    download "$@"
}

# unpack WHAT-FOR PROGRAMS PACKAGES...: what the packages need of other packages is named with them.
unpack() {
    local purpose=$1 programs=$2
    shift 2
    # shellcheck disable=SC2086
    if there $programs; then return; fi
    if ! { command -v apt-get && command -v dpkg-deb; } >/dev/null; then
        say "no apt-get: $purpose are skipped unless these are on the PATH: $programs"
        return
    fi
    say "$*, from Debian"
    rm -rf "$work/debs"
    mkdir -p "$work/debs" "$tools"
    if ! { download "$@" || download_with_own_lists "$@"; } 2>"$work/log"; then
        say "not to be had; $purpose are skipped: $(tail -n 1 "$work/log")"
        return
    fi
    local package
    for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$tools"; done
}

unpack "the tests of alert rules" "prometheus promtool" 'prometheus=2.42.*'
unpack "the tests of the directory" redis-server redis-server redis-tools libjemalloc2 liblzf1
unpack "the tests behind a proxy" nginx nginx libpcre2-8-0
