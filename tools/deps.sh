#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that a build is missing. usage: deps.sh build|test|check
#
# Looks for the tools and files themselves, so that what came from elsewhere counts. Says nothing
# and does nothing when all is there; otherwise prints its one apt-get line and runs it.
set -u

level=${1:-}
case $level in
build | test | check) ;;
*)
    echo "usage: deps.sh build|test|check" >&2
    exit 2
    ;;
esac

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

missing=
need() {
    case "$missing " in
    *" $1 "*) ;;
    *) missing="$missing $1" ;;
    esac
}
has_tool() {
    command -v "$1" >/dev/null 2>&1
}
# has_library CC HEADERS LINK_OPTION...: whether a program that uses it compiles and links
has_library() {
    cc=$1
    headers=$2
    shift 2
    for header in $headers; do
        echo "#include <$header>"
    done >"$work/probe.c"
    echo "int main(void) { return 0; }" >>"$work/probe.c"
    "$cc" "$work/probe.c" -o "$work/probe" "$@" >/dev/null 2>&1
}

has_module() {
    "$1" -c "import $2" >/dev/null 2>&1
}

# Without a compiler no library can be looked for by compiling: then all are asked for, and apt
# leaves alone what is there.
cc=
for name in "${CC:-cc}" gcc clang; do
    if [ -z "$cc" ] && has_tool "${name%% *}" && has_library "${name%% *}" stdlib.h; then
        cc=${name%% *}
    fi
done
if [ -z "$cc" ]; then
    has_tool gcc || need gcc
    need libc6-dev
fi
has_tool make || need make
has_tool ar || need binutils
{ [ -n "$cc" ] && has_library "$cc" jansson.h -ljansson; } || need libjansson-dev
{ [ -n "$cc" ] && has_library "$cc" utf8proc.h -lutf8proc; } || need libutf8proc-dev
{ [ -n "$cc" ] && has_library "$cc" pcre2.h -DPCRE2_CODE_UNIT_WIDTH=8 -lpcre2-8; } ||
    need libpcre2-dev
{ [ -n "$cc" ] && has_library "$cc" openssl/sha.h -lcrypto; } || need libssl-dev
{ [ -n "$cc" ] && has_library "$cc" zstd.h -lzstd; } || need libzstd-dev
{ [ -n "$cc" ] && has_library "$cc" xxhash.h; } || need libxxhash-dev
{ [ -n "$cc" ] && has_library "$cc" hiredis/hiredis.h -lhiredis; } || need libhiredis-dev
{ [ -n "$cc" ] && has_library "$cc" liburing.h -luring; } || need liburing-dev

if [ "$level" != build ]; then
    cmocka_headers="stdarg.h stddef.h stdint.h setjmp.h cmocka.h"
    { [ -n "$cc" ] && has_library "$cc" "$cmocka_headers" -lcmocka; } || need libcmocka-dev
    has_tool python3 || need python3
    has_tool c++ || has_tool g++ || has_tool clang++ || need g++
    has_tool pkg-config || need pkg-config
    # Tests start their own; the one that the package may start is left alone.
    has_tool redis-server || need redis-server
    # The package's tests look for them in the same two places.
    { has_module python3 pytest || has_module /usr/bin/python3 pytest; } || need python3-pytest
    { has_module python3 ensurepip || has_module /usr/bin/python3 ensurepip; } || need python3-venv
fi

# The sanitizers and libFuzzer of clang are in a package of their own, named for its version.
clang_runtime() {
    version=$(clang -dumpversion 2>/dev/null | cut -d. -f1)
    if [ -z "$version" ]; then
        version=$(apt-cache depends clang 2>/dev/null |
            sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p')
    fi
    echo "libclang-rt-${version}-dev"
}
has_fuzzer() {
    echo '#include <stdint.h>
#include <stddef.h>
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{ return bytes && num_bytes > 9 ? 0 : 0; }' >"$work/fuzz.c"
    clang -fsanitize=fuzzer,address,undefined "$work/fuzz.c" -o "$work/fuzz" >/dev/null 2>&1
}

update=
if [ "$level" = check ]; then
    has_tool gcc || need gcc
    has_tool clang || need clang
    has_tool clang-format || need clang-format
    if ! has_tool clang || ! has_fuzzer; then
        # Which version this system has is in apt's lists, which a fresh system lacks.
        if ! has_tool clang && has_tool apt-cache && ! apt-cache show clang >/dev/null 2>&1; then
            update=first
        fi
        need CLANG_RUNTIME
    fi
fi

[ -z "$missing" ] && exit 0

as_root=
if [ "$(id -u)" != 0 ]; then
    if has_tool sudo; then
        as_root=sudo
    else
        as_root=none
    fi
fi
if ! has_tool apt-get || [ "$as_root" = none ]; then
    packages=$(echo "$missing" | sed "s/CLANG_RUNTIME/the sanitizer runtime of clang/")
    echo "deps.sh: please install, or what your system calls them:$packages" >&2
    exit 1
fi

apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get "$@"
}
for package in $missing; do
    if [ "$package" != CLANG_RUNTIME ] && ! apt-cache show "$package" >/dev/null 2>&1; then
        update=first
    fi
done
if [ -n "$update" ]; then
    apt update -qq || exit 1
fi
packages=
for package in $missing; do
    [ "$package" = CLANG_RUNTIME ] && package=$(clang_runtime)
    packages="$packages $package"
done
echo "${as_root:+$as_root }apt-get install -y --no-install-recommends$packages"
apt install -y -qq --no-install-recommends $packages >"$work/log" 2>&1 && exit 0
# Lists that are out of date name packages that are gone.
apt update -qq && apt install -y -qq --no-install-recommends $packages >"$work/log" 2>&1 && exit 0
cat "$work/log" >&2
exit 1
