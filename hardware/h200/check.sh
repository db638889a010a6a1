#!/usr/bin/env bash
# The prepared check of an H200 machine, from a plain checkout: hardware/h200/README.md says what it does and leaves.
#   hardware/h200/check.sh [OUT] [--dry-run] [other options of forebay.hardware.checking.check]
# OUT is the folder for the results; without it $OUT is taken. CHECK_DRY=1 is --dry-run, PYTHON the interpreter (python3).
exec "$(dirname "${BASH_SOURCE[0]}")/../checking/check.sh" h200 "$@" --tools "${CUDA_HOME:-/usr/local/cuda}"
