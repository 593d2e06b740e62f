#!/usr/bin/env bash
# The owner's cuda-vmm backend on a real card: load, attach, crashes, leaks. Needs root (for a memory-backed file), the three binaries
# and memory for the file; prints what it sees, and the figures of `ds4 bench load` as the last line.
#   tests/gpu/load.sh DIRECTORY-OF-BINARIES [full|block]
# full is the whole Flash shape (80.8 GiB); block its prediction block alone, some 2 GiB of the same kinds of tensors.
set -uo pipefail
bin=${1:?directory of ds4, ds4-weight-owner and ds4-worker}
# How long after they have the weights workers are killed (a context takes 0.2 s, comparing all bytes 2.5 s or 0.1), what keeps them
# attached so long, and what only a whole model needs.
case ${2:-full} in
full) part=model size=112G kills=1 reads=() attach=(--attach-cycles 200) ;;
block) part=mtp size=8G kills='0.05 0.2 0.25 0.3 0.5' reads=(--self-test-cycles 2000) attach=() ;;
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
mount -t tmpfs -o size="$size",huge=always tmpfs "$work/m" || exit 2
trap 'umount "$work/m"; rm -rf "$work"' EXIT
model=$work/m/model.gguf
"$bin/ds4" gguf synth --shape full --recipe q2 --part "$part" -o "$model" || exit 2

before=$(used)
say "device memory used: $before MiB"
"$bin/ds4-weight-owner" --config /dev/null --backend cuda-vmm --model "$model" --runtime-dir "$work/run" >"$work/log" 2>&1 &
owner=$!
until grep -q 'ready models' "$work/log"; do
    kill -0 $owner 2>/dev/null || { tail -n 12 "$work/log"; exit 1; }
    sleep 0.05
done
grep -E 'stage=|WARN|READY' "$work/log"
name=$(sed -n 's/.* READY model="\([^"]*\)".*/\1/p' "$work/log")
grep VmRSS "/proc/$owner/status"
grep -q libcuda "/proc/$owner/maps" && fail "the daemon has opened libcuda"
selftest() { exec "$bin/ds4-worker" --config /dev/null --runtime-dir "$work/run" --model "$name" --self-test --verify-weights "$@"; }
attached() {
    until "$bin/ds4" ctl --runtime-dir "$work/run" leases | grep -q "self-test $worker"; do
        kill -0 $worker || { tail -n 3 "$work/self"; fail "the worker had no lease"; }
    done
}
sleep 0.7 # the loader's end
weights=$(used)
[ "$weights" -gt "$before" ] || fail "$weights MiB used with the weights, $before without"

for after in $kills; do
    say "a worker is killed while it reads, $after s after its lease"
    selftest "${reads[@]}" >"$work/self" 2>&1 &
    worker=$!
    attached
    sleep "$after"
    kill -9 $worker || fail "it had ended before"
    wait $worker 2>/dev/null
    expect_used "$weights"
done
(selftest --self-test-cycles 200 2>/dev/null) || fail "bytes, or memory after 200 attaches"
say "the owner is killed under a worker that reads"
selftest >"$work/self" 2>&1 &
worker=$!
attached
kill -9 $owner
wait $owner 2>/dev/null
wait $worker || { tail -n 3 "$work/self"; fail "the worker did not outlive its owner"; }
tail -n 1 "$work/self"
expect_used "$before"
"$bin/ds4" bench --json load --model "$model" --backend cuda-vmm --repeats 5 "${attach[@]}" || fail "ds4 bench load"
