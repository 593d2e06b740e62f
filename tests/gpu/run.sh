#!/usr/bin/env bash
# The checks that need a card, on a machine that has nothing but one and the built binaries.
#
#   tests/gpu/run.sh BINARIES FIXTURES OUT.json PART...
#
# BINARIES has ds4, ds4-weight-owner and ds4-worker (built with `--features ds4-worker/cuda,ds4-weight-owner/cuda`) and, for the
# part `device`, the example `gpu` of ds4-models (built with its feature `cuda`); stripped, they are small enough to carry. FIXTURES
# is tests/fixtures. Parts, in the order given:
#   device  conformance of every operation, every family of `ds4 bench kernel`, single layers of each kind at the full Flash shape against
#           the CPU, and whole models against transformers (about a minute)
#   tiny    owner, workers and HTTP on the fixtures: the greedy tokens of a CPU worker, with graphs and without, alone and together;
#           kills; 200 attaches
#   starter SmolLM2 (the file DS4_STARTER_MODEL): as tiny, against transformers' tokens and logits, and `ds4 bench throughput`; needs `gpu`
#   memory  the allocations of a worker refused one at a time (all, or DS4_GPU_MEMORY=1-40,55; at most DS4_GPU_MEMORY_S seconds, 60)
#   small   as tiny, on a synthetic model of 90 MB with the production geometry; SIGKILL in the middle of a prompt; guesses of a
#           prediction block; `ds4 bench restart`
#   soak    as small, a minute of clients that come, hang up and come again, while worker after worker is killed or relieved: every answer is a
#           quiet worker's, nothing grows (DS4_GPU_SOAK_S seconds, 60)
#   full    the load, SIGKILL in the middle of a prompt, `ds4 bench throughput` (decode behind 2k, 8k and 64k: DS4_GPU_AT) and `ds4 bench
#           restart` at the full Flash shape (80.8 GiB in tmpfs: some minutes; needs root)
# Exit code 1 when a check failed; OUT.json says which.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec python3 "$here/end_to_end.py" "$@"
