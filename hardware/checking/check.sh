#!/usr/bin/env bash
# A prepared check from a plain checkout: checking/check.sh MACHINE [OUT] [options of forebay.hardware.checking.check]
# The script of each machine starts it. OUT is the folder for the results; without it $OUT is taken. CHECK_DRY=1 is --dry-run, PYTHON
# the interpreter (python3). Temporary files of compilers lie in a folder that goes at the end.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
machine=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=()
if [[ $# -eq 0 || $1 == --* ]]; then out=("${OUT:?name the folder for the results: check.sh OUT, or set OUT}"); fi
dry=()
if [[ ${CHECK_DRY:-0} == 1 ]]; then dry=(--dry-run); fi
"$python" "$root/hardware/checking/links.py" "$root" "$work/site"
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR="$work/triton"
status=0
"$python" -m forebay.hardware.checking.check "forebay.hardware.$machine" "${out[@]}" "$@" "${dry[@]}" --work "$work" || status=$?
exit "$status"
