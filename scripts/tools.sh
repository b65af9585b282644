#!/usr/bin/env bash
# Unpacks programs that tests use into .venv/tools: Prometheus for alert rules, Redis for the cluster
# registry, nginx as a reverse proxy, Chromium for the live page. The Debian packages are unpacked, not installed, so no root is
# needed. Programs that are already there or on the PATH are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.venv/tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
own_lists=()

say() { echo "install: $*" >&2; }

are_available() {
    local program
    for program in "$@"; do
        if ! [[ -x $tools/usr/bin/$program || -x $tools/usr/sbin/$program ]] &&
            ! command -v "$program" >/dev/null; then return 1; fi
    done
}

download() { (cd "$work/debs" && apt-get -qq ${own_lists[@]+"${own_lists[@]}"} download "$@"); }

# If the system's package lists are outdated or missing, fetches private lists, once.
download_with_own_lists() {
    if [[ -z ${own_lists[*]-} ]]; then
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
        own_lists=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1)
        apt-get -qq "${own_lists[@]}" update || return
    fi
    download "$@"
}

# unpack PURPOSE PROGRAMS PACKAGES...: PACKAGES must include their dependencies.
unpack() {
    local purpose=$1 programs=$2
    shift 2
    # shellcheck disable=SC2086
    if are_available $programs; then return; fi
    if ! { command -v apt-get && command -v dpkg-deb; } >/dev/null; then
        say "apt-get is not available: $purpose are skipped unless these programs are on the PATH: $programs"
        return
    fi
    say "$programs, from Debian packages"
    rm -rf "$work/debs"
    mkdir -p "$work/debs" "$tools"
    if ! { download "$@" || download_with_own_lists "$@"; } 2>"$work/log"; then
        say "the download failed; $purpose are skipped: $(tail -n 1 "$work/log")"
        return
    fi
    local package
    for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$tools"; done
}

unpack "the tests of alert rules" "prometheus promtool" 'prometheus=2.42.*'
unpack "the tests of the cluster registry" redis-server redis-server redis-tools libjemalloc2 liblzf1
unpack "the tests behind a proxy" nginx nginx libpcre2-8-0
# 120 MB. All libraries but those of every Python image: glibc, libgcc, libstdc++ and zlib.
unpack "the browser tests" chromium-headless-shell chromium-headless-shell chromium-common fonts-dejavu-core \
    libasound2 libasyncns0 libatk1.0-0 libatspi2.0-0 libblkid1 libbrotli1 libbsd0 libcap2 libdav1d6 libdbus-1-3 \
    libdouble-conversion3 libdrm2 libexpat1 libffi8 libflac12 libfontconfig1 libfreetype6 libgbm1 libgcrypt20 \
    libglib2.0-0 libgpg-error0 libgraphite2-3 libharfbuzz-subset0 libharfbuzz0b libjpeg62-turbo liblcms2-2 liblz4-1 \
    liblzma5 libmd0 libminizip1 libmount1 libmp3lame0 libmpg123-0 libnspr4 libnss3 libogg0 libopenh264-7 \
    libopenjp2-7 libopus0 libpcre2-8-0 libpng16-16 libpulse0 libselinux1 libsndfile1 libsqlite3-0 libsystemd0 libudev1 \
    libvorbis0a libvorbisenc2 libwayland-server0 libx11-6 libx11-xcb1 libxau6 libxcb1 libxcomposite1 libxdamage1 \
    libxdmcp6 libxext6 libxfixes3 libxi6 libxkbcommon0 libxnvctrl0 libxrandr2 libxrender1 libzstd1
