#!/usr/bin/env bash
# The prepared check of an H200 machine, from a plain checkout: hardware/h200/README.md says what it does and leaves.
#   hardware/h200/check.sh [OUT] [--dry-run] [other options of forebay.hardware.h200.check]
# OUT is the folder for the results; without it $OUT is taken. CHECK_DRY=1 is --dry-run, PYTHON the interpreter (python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=()
if [[ $# -eq 0 || $1 == --* ]]; then out=("${OUT:?name the folder for the results: check.sh OUT, or set OUT}"); fi
dry=()
if [[ ${CHECK_DRY:-0} == 1 ]]; then dry=(--dry-run); fi
"$python" "$root/hardware/h200/links.py" "$root" "$work/site"
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR="$work/triton"
status=0
"$python" -m forebay.hardware.h200.check "${out[@]}" "$@" "${dry[@]}" \
    --work "$work" --cuda-home "${CUDA_HOME:-/usr/local/cuda}" || status=$?
exit "$status"
