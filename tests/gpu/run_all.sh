#!/usr/bin/env bash
# The whole GPU suite on one machine with a CUDA device: the package installed, then _random.py copied over torch's own.
# Needs pytest and hypothesis; the files that need expecttest are left out, and have no GPU tests.
# Usage: bash tests/gpu/run_all.sh [PYTHON [PROCESSES]]
set -u
python=${1:-python3}
processes=${2:-12}
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
logs=$(mktemp -d)
kept=$(mktemp)
trap 'rm -rf "$logs" "$kept"' EXIT

in_parts() { # the tests of the files $@, spread over processes
  local part pids=() failed=0
  for ((part = 0; part < processes; part++)); do
    TDR_PART=$part/$processes "$python" -m pytest "$@" -m gpu -p no:cacheprovider >"$logs/$part" 2>&1 &
    pids+=($!)
  done
  for ((part = 0; part < processes; part++)); do
    wait "${pids[part]}" || failed=1
    if grep -q -E "failed|error" "$logs/$part"; then cat "$logs/$part"; else tail -n 1 "$logs/$part"; fi
  done
  return $failed
}

mapfile -t with_expecttest < <(grep -l "import expecttest" tests/*.py)
in_parts tests "${with_expecttest[@]/#/--ignore=}"
installed=$?

torchs=$("$python" -c 'import torch.distributed.tensor._random as r; print(r.__file__)')
cp "$torchs" "$kept"
trap 'cp "$kept" "$torchs"; rm -rf "$logs" "$kept"' EXIT
cp torch_dtensor_rng/_random.py "$torchs"
TDR_IN_TREE=copied in_parts tests/test_semantics.py tests/test_local_tensor.py
copied=$?
exit $((installed || copied))
