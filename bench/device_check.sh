#!/bin/bash
# The loss on a GPU in a few minutes: right against the float64 oracle, then timed against Liger and the plain loss.
#
#   PYTHON=.venv/bin/python bench/device_check.sh [rows] [columns]
#
# Needs a CUDA build of torch (which brings triton); Liger is timed where liger-kernel is installed.
set -eu -o pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.device_check "$@"
