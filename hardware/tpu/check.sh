#!/usr/bin/env bash
# The prepared check of a TPU host, from a plain checkout: hardware/tpu/README.md says what it does and leaves.
#   hardware/tpu/check.sh [OUT] [--dry-run] [other options of forebay.hardware.checking.check]
# OUT is the folder for the results; without it $OUT is taken. CHECK_DRY=1 is --dry-run, PYTHON the interpreter (python3).
exec "$(dirname "${BASH_SOURCE[0]}")/../checking/check.sh" tpu "$@"
