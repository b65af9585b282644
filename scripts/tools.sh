#!/usr/bin/env bash
# Puts Prometheus and promtool into .venv/tools, for the tests of the rules: from Debian's package,
# unpacked and not installed, so that it needs no root. Does nothing when it is there, or on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
package='prometheus=2.42.*'
tools=$PWD/.venv/tools

say() { echo "install: $*" >&2; }

if [[ -x $tools/usr/bin/promtool ]] || { command -v promtool && command -v prometheus; } >/dev/null; then exit 0; fi
if ! { command -v apt-get && command -v dpkg-deb; } >/dev/null; then
    say "no apt-get: the tests of alert rules are skipped unless prometheus and promtool are on the PATH"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

download() { (cd "$work" && apt-get -qq "$@" download "$package"); }

# Where the system's lists are old or missing, lists of our own are fetched.
download_with_own_lists() {
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    local options=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1)
    apt-get -qq "${options[@]}" update && download "${options[@]}"
}

say "$package, from Debian"
if ! { download || download_with_own_lists; } 2>"$work/log"; then
    say "not to be had; the tests of alert rules are skipped: $(tail -n 1 "$work/log")"
    exit 0
fi
mkdir -p "$tools"
dpkg-deb --extract "$work"/prometheus_*.deb "$tools"
