#!/usr/bin/env bash
# Packs what run.sh needs on a machine that has nothing: the stripped binaries of target/release (built with
# `--features ds4-models/cuda,ds4-worker/cuda,ds4-weight-owner/cuda --example gpu --example gpu_speed --bins`), the scripts and the fixtures.
#   tests/gpu/pack.sh OUT.tar.xz
# There: python3 -m tarfile -e OUT.tar.xz . && bash gpu/run.sh bin fixtures out.json device tiny memory small full
set -euo pipefail
out=$(realpath "${1:?a file to write}")
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A build without the features overwrites these two.
for b in ds4-weight-owner ds4-worker; do
    nm "$root/target/release/$b" | grep CudaDevice >/dev/null || { echo "$b was built without CUDA kernels" >&2; exit 1; }
done
mkdir "$work/bin"
for b in ds4 ds4-weight-owner ds4-worker examples/gpu examples/gpu_speed; do
    strip -o "$work/bin/${b##*/}" "$root/target/release/$b"
done
tar -C "$work" -I 'xz -T0' -cf "$out" bin -C "$root/tests" gpu/run.sh gpu/end_to_end.py gpu/harness.py gpu/refusals.py gpu/soak.py gpu/load.sh --exclude=convert fixtures
ls -l "$out"
