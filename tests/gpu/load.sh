#!/usr/bin/env bash
# The owner's cuda-vmm backend on a real card: load, attach, crashes, leaks. Needs root (for a memory-backed file), 112 GiB
# of memory and the three binaries; prints what it sees, and the figures of `ds4 bench load` as the last line.
#   tests/gpu/load.sh DIRECTORY-OF-BINARIES
set -uo pipefail
bin=${1:?directory of ds4, ds4-weight-owner and ds4-worker}
work=$(mktemp -d)
say() { printf '== [%d s] %s\n' "$SECONDS" "$*"; }
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }

mkdir "$work/m" "$work/run"
# Huge pages: with small ones the first load of a fresh file took 5.8 s where this takes 3.3 s.
mount -t tmpfs -o size=112G,huge=always tmpfs "$work/m" || exit 2
trap 'umount "$work/m"; rm -rf "$work"' EXIT
model=$work/m/full.gguf
"$bin/ds4" gguf synth --shape full --recipe q2 -o "$model" || exit 2

say "device memory used: $(used)"
"$bin/ds4-weight-owner" --config /dev/null --backend cuda-vmm --model "$model" --runtime-dir "$work/run" >"$work/log" 2>&1 &
owner=$!
until grep -q 'ready models' "$work/log"; do
    kill -0 $owner 2>/dev/null || { tail -n 3 "$work/log"; exit 1; }
    sleep 0.05
done
grep -E 'stage=|WARN|READY' "$work/log"
grep VmRSS "/proc/$owner/status"
grep -q libcuda "/proc/$owner/maps" && { echo "the daemon has opened libcuda"; exit 1; }
selftest() { "$bin/ds4-worker" --config /dev/null --runtime-dir "$work/run" --self-test "$@"; }

say "a worker is killed while it reads"
selftest --verify-weights >/dev/null 2>&1 &
worker=$!
sleep 1.2
kill -9 $worker
wait $worker 2>/dev/null
sleep 0.5
say "device memory used: $(used)"
selftest --verify-weights --self-test-cycles 200 2>/dev/null || exit 1
say "the owner is killed under a worker that reads"
selftest --verify-weights 2>/dev/null &
worker=$!
sleep 1
kill -9 $owner
wait $owner 2>/dev/null
wait $worker || exit 1
sleep 0.5
say "device memory used: $(used)"
"$bin/ds4" bench --json load --model "$model" --backend cuda-vmm --repeats 5 --attach-cycles 200
