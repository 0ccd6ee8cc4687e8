#!/usr/bin/env bash
# The whole GPU suite on one machine with a CUDA device: the package installed, then _random.py copied over torch's own.
# Needs pytest and hypothesis; the two files left out need expecttest and have no GPU tests.
# Usage: bash tests/gpu/run_all.sh [PYTHON]
set -u
python=${1:-python3}
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD
"$python" -m pytest tests -m gpu -p no:cacheprovider --ignore=tests/test_errors.py --ignore=tests/test_golden.py
installed=$?

torchs=$("$python" -c 'import torch.distributed.tensor._random as r; print(r.__file__)')
kept=$(mktemp)
cp "$torchs" "$kept"
trap 'cp "$kept" "$torchs"; rm -f "$kept"' EXIT
cp torch_dtensor_rng/_random.py "$torchs"
TDR_IN_TREE=copied "$python" -m pytest tests/test_semantics.py tests/test_local_tensor.py -m gpu -p no:cacheprovider
copied=$?
exit $((installed || copied))
