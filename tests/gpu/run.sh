#!/usr/bin/env bash
# The checks that need a card, on a machine that has nothing but one and the built binaries.
#
#   tests/gpu/run.sh BINARIES FIXTURES OUT.json PART...
#
# BINARIES has ds4, ds4-weight-owner and ds4-worker (built with `--features ds4-worker/cuda,ds4-weight-owner/cuda`) and, for the
# part `device`, the example `gpu` of ds4-models (built with its feature `cuda`); stripped, they are small enough to carry. FIXTURES
# is tests/fixtures. Parts, in the order given:
#   device  conformance of every operation, and whole models against transformers (about half a minute)
#   tiny    owner, workers and HTTP on the fixtures: the greedy tokens of a CPU worker, with graphs and without, alone and together;
#           kills; 200 attaches
#   small   the same on a synthetic model of 40 MB with the production geometry, and `ds4 bench restart`
#   full    `ds4 bench restart` and `ds4 bench throughput` at the full Flash shape (80.8 GiB in tmpfs: some minutes; needs root)
# Exit code 1 when a check failed; OUT.json says which.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec python3 "$here/end_to_end.py" "$@"
