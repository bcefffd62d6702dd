#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds llama.cpp with native flags and times it beside imbrex, on the same files.
#
# The source comes from the package llama-cpp-python of PyPI, which holds llama.cpp. It is built
# once, without curl, GPUs and server, in a folder outside of the tree; what is there is used again.
set -eu

usage="usage: llama_cpp.sh [options] FILE.gguf...
       llama_cpp.sh [options] -q TYPE FILE.gguf OUTPUT.gguf
Times llama.cpp and imbrex in turns on each file and prints the medians of the pairs' ratios.
  -c DIR   where llama.cpp is built    (default \${XDG_CACHE_HOME:-~/.cache}/imbrex)
  -v VER   version of llama-cpp-python (default: the one that is built, else the newest)
  -j N     compilations at once        (default: all CPUs)
  -B       build only, and print the folder of its programs
  -q TYPE  let llama-quantize make a file of a type, such as Q4_K_M, instead of timing
  -i FILE  the program of imbrex       (default build/imbrex)
  -k KIND  kernels of imbrex, as its --cpu: bf16 rounds activations as llama.cpp does where the CPU
           has bf16 dot products (default auto)
  -t LIST  threads                     (default: all CPUs)
  -p LIST  prompt tokens; 0: none      (default 512)
  -n LIST  generated tokens; 0: none   (default 128)
  -d LIST  tokens in the context before either (default 0)
  -r N     pairs                       (default 10)
  -o FILE  write everything as JSON too"

fail() {
    echo "llama_cpp.sh: $1" >&2
    exit "${2:-1}"
}

cache=${XDG_CACHE_HOME:-${HOME:-.}/.cache}/imbrex
version= jobs=$(nproc 2>/dev/null || echo 1) build_only= quantize= imbrex=build/imbrex
kernels=auto threads=$jobs prompt=512 generate=128 depths=0 pairs=10 output=
while getopts c:v:j:Bq:i:k:t:p:n:d:r:o:h option; do
    case $option in
    c) cache=$OPTARG ;;
    v) version=$OPTARG ;;
    j) jobs=$OPTARG ;;
    B) build_only=1 ;;
    q) quantize=$OPTARG ;;
    i) imbrex=$OPTARG ;;
    k) kernels=$OPTARG ;;
    t) threads=$OPTARG ;;
    p) prompt=$OPTARG ;;
    n) generate=$OPTARG ;;
    d) depths=$OPTARG ;;
    r) pairs=$OPTARG ;;
    o) output=$OPTARG ;;
    h)
        echo "$usage"
        exit 0
        ;;
    *)
        echo "$usage" >&2
        exit 2
        ;;
    esac
done
shift $((OPTIND - 1))

# Faults of the command line, before a build that takes minutes.
if [ -n "$quantize" ]; then
    [ $# -eq 2 ] || fail "-q: expected the file to read and the file to write, found $# operands" 2
elif [ -z "$build_only" ]; then
    [ $# -ge 1 ] || fail "expected at least one GGUF file; llama_cpp.sh -h shows the options" 2
    [ -x "$imbrex" ] || fail "-i: expected the program of imbrex, found no program '$imbrex'" 2
    case $pairs in
    '' | *[!0-9]* | 0*) fail "-r: expected a whole number of at least 1, found '$pairs'" 2 ;;
    esac
    for file in "$@"; do
        [ -r "$file" ] || fail "$file: cannot read it" 2
    done
fi

mkdir -p "$cache" || fail "-c: $cache: cannot make it"
cache=$(cd "$cache" && pwd)

# The newest folder of the version asked for that has a file: vendor/llama.cpp/CMakeLists.txt, or
# `built`, which is written last.
find_folder() {
    # shellcheck disable=SC2231 # a pattern
    for folder in "$cache"/llama_cpp_python-${version:-[0-9]*}; do
        if [ -f "$folder/$1" ]; then
            echo "$folder"
        fi
    done | sort -V | tail -n 1
}

need_tools() {
    packages="cmake g++ make python3-pip"
    for tool in cmake c++ make python3; do
        command -v "$tool" >/dev/null 2>&1 ||
            fail "expected $tool to build with, found none; on Debian: apt-get install $packages"
    done
    python3 -m pip --version >/dev/null 2>&1 ||
        fail "expected pip to fetch llama.cpp, found none; on Debian: apt-get install $packages"
}

# The folder appears when it is whole.
fetch() {
    work=$(mktemp -d "$cache/work.XXXXXX") || fail "$cache: cannot write"
    trap 'rm -rf "$work"' EXIT
    echo "llama_cpp.sh: fetching llama-cpp-python${version:+ $version}" >&2
    python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" \
        "llama-cpp-python${version:+==$version}" >&2 || fail "pip could not fetch llama-cpp-python"
    tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
    rm "$work"/llama_cpp_python-*.tar.gz
    set -- "$work"/llama_cpp_python-*/
    [ -f "$1/vendor/llama.cpp/CMakeLists.txt" ] ||
        fail "$(basename "$1"): expected vendor/llama.cpp in it, found none"
    folder=$cache/$(basename "$1")
    mv "$1" "$folder"
    rm -rf "$work"
    trap - EXIT
}

# Goes on where a build was broken off.
build() {
    name=$(basename "$folder")
    # The package names the commit in its changelog; it has no whole repository.
    commit=$(sed -n 's/.*ggml-org\/llama\.cpp@\([0-9a-f]*\).*/\1/p' "$folder/CHANGELOG.md" |
        head -n 1)
    flags="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAMA_OPENSSL=OFF
        -DLLAMA_CURL=OFF -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=OFF
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
        -DLLAMA_BUILD_UI=OFF"
    echo "llama_cpp.sh: building $name in $folder/build; the log is $folder/build.log" >&2
    # shellcheck disable=SC2086 # the flags are words
    {
        cmake -S "$folder/vendor/llama.cpp" -B "$folder/build" $flags &&
            cmake --build "$folder/build" -j "$jobs" --target llama-bench llama-quantize
    } >"$folder/build.log" 2>&1 || fail "llama.cpp could not be built; see $folder/build.log"
    # shellcheck disable=SC2086
    {
        echo "package ${name#llama_cpp_python-}"
        echo "commit ${commit:-unknown}"
        echo "compiler $(c++ --version | head -n 1)"
        echo "flags" $flags
    } >"$folder/built.part"
    mv "$folder/built.part" "$folder/built"
}

# Another call may be building it: wait for it, rather than begin again.
if command -v flock >/dev/null 2>&1; then
    exec 9>"$cache/lock"
    flock 9
fi
folder=$(find_folder built)
if [ -z "$folder" ]; then
    need_tools
    folder=$(find_folder vendor/llama.cpp/CMakeLists.txt)
    [ -n "$folder" ] || fetch
    build
fi
exec 9>&-
programs=$folder/build/bin

if [ -n "$build_only" ]; then
    echo "$programs"
elif [ -n "$quantize" ]; then
    # Next to its place until it is whole.
    "$programs/llama-quantize" "$1" "$2.part" "$quantize" "$jobs" >&2 || {
        rm -f "$2.part"
        fail "llama-quantize could not make $2"
    }
    mv "$2.part" "$2"
else
    exec python3 "$(dirname "$0")/llama_cpp.py" --llama-cpp "$folder" --imbrex "$imbrex" \
        --cpu "$kernels" --threads "$threads" --prompt "$prompt" --generate "$generate" \
        --depths "$depths" --pairs "$pairs" ${output:+--output "$output"} -- "$@"
fi
