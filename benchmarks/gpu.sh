#!/usr/bin/env bash
# Everything that only a GPU can show, in under six minutes: correctness first, then the service and its IPC between two
# processes, then rates. Takes the Python it is given (torch >= 2.11 with CUDA, triton >= 3.6, cupy, numpy and what the tests
# need); the sources need not be installed.
#
#   benchmarks/gpu.sh [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
export PYTHONPATH="$PWD/protos:$PWD/cache_service:$PWD/compute_service:$PWD/kernels:$PWD/clients:$PWD/tests:$PWD/benchmarks"
unset KVPLANE_EMULATE_CUDA TRITON_INTERPRET

reason=$("$python" -c 'from kvplane.kernels.cuda.runtime import why_not; print(why_not() or "")') || exit 2
if [ -n "$reason" ]; then
  echo "no device: $reason"
  exit 2
fi
failed=0
step() {
  local name=$1 start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  "$@" || { failed=1; printf '=== %s: FAILED\n' "$name"; }
  printf '=== %s: %d s\n' "$name" $((SECONDS - start))
}
pytest=("$python" -m pytest -q -p no:cacheprovider -W default --timeout 240)
step "kernels against the reference" timeout 150 "${pytest[@]}" -m gpu tests/kernels/test_gpu.py
step "the service, remote and attached over CUDA IPC" timeout 90 "${pytest[@]}" tests/compute/cuda_checks.py \
  -k "registration or remote_steps or attached_process or restart or without_kernels"
step "rates" timeout 110 "$python" benchmarks/_attention_cuda.py
exit $failed
