#!/usr/bin/env bash
# The owner's cuda-vmm backend on a real card: load, attach, crashes, leaks. Needs root (for a memory-backed file), the three binaries
# and memory for the file; prints what it sees, and the figures of `ds4 bench load` as the last line.
#   tests/gpu/load.sh DIRECTORY-OF-BINARIES [full|block]
# full is the whole Flash shape (80.8 GiB); block its prediction block alone, some 2 GiB of the same kinds of tensors.
set -uo pipefail
bin=${1:?directory of ds4, ds4-weight-owner and ds4-worker}
# Of a worker that reads: seconds until it is killed, arguments, and seconds until its owner is.
case ${2:-full} in
full) part=model size=112G kills=1.2 reads=() owner_after=1 ;;
block) part=mtp size=8G kills='0.26 0.3 0.35 0.4' reads=(--self-test-cycles 2000) owner_after=0.4 ;;
*) echo "no file $2: full or block" >&2; exit 2 ;;
esac
work=$(mktemp -d)
say() { printf '== [%d s] %s\n' "$SECONDS" "$*"; }
fail() { say "FAILED: $*"; exit 1; }
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; }
# Device memory in use is what is named, once processes that have just ended are gone.
expect_used() {
    local now
    for _ in {1..20}; do
        now=$(used)
        [ "$now" = "$1" ] && { say "device memory used: $now MiB"; return; }
        sleep 0.25
    done
    fail "$now MiB of device memory used, $1 expected"
}

mkdir "$work/m" "$work/run"
# Huge pages: with small ones the first load of a fresh file took 5.8 s where this takes 3.3 s.
mount -t tmpfs -o size=$size,huge=always tmpfs "$work/m" || exit 2
trap 'umount "$work/m"; rm -rf "$work"' EXIT
model=$work/m/model.gguf
"$bin/ds4" gguf synth --shape full --recipe q2 --part $part -o "$model" || exit 2

before=$(used)
say "device memory used: $before MiB"
"$bin/ds4-weight-owner" --config /dev/null --backend cuda-vmm --model "$model" --runtime-dir "$work/run" >"$work/log" 2>&1 &
owner=$!
until grep -q 'ready models' "$work/log"; do
    kill -0 $owner 2>/dev/null || { tail -n 12 "$work/log"; exit 1; }
    sleep 0.05
done
grep -E 'stage=|WARN|READY' "$work/log"
grep VmRSS "/proc/$owner/status"
grep -q libcuda "/proc/$owner/maps" && fail "the daemon has opened libcuda"
selftest() { exec "$bin/ds4-worker" --config /dev/null --runtime-dir "$work/run" --self-test "$@"; }
sleep 0.7 # the loader's end
weights=$(used)
[ "$weights" -gt "$before" ] || fail "$weights MiB used with the weights, $before without"

for after in $kills; do
    say "a worker is killed while it reads, after $after s"
    selftest --verify-weights "${reads[@]}" >/dev/null 2>&1 &
    worker=$!
    sleep "$after"
    kill -9 $worker || fail "it had ended before"
    wait $worker 2>/dev/null
    expect_used "$weights"
done
(selftest --verify-weights --self-test-cycles 200 2>/dev/null) || fail "bytes, or memory after 200 attaches"
say "the owner is killed under a worker that reads"
selftest --verify-weights >"$work/self" 2>&1 &
worker=$!
sleep "$owner_after"
kill -0 $worker || fail "the worker had ended before its owner was killed"
kill -9 $owner
wait $owner 2>/dev/null
wait $worker || { tail -n 3 "$work/self"; fail "the worker did not outlive its owner"; }
cat "$work/self"
expect_used "$before"
"$bin/ds4" bench --json load --model "$model" --backend cuda-vmm --repeats 5 --attach-cycles 200 || fail "ds4 bench load"
