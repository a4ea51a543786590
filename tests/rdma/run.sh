#!/usr/bin/env bash
# run.sh [PYTEST_ARGS...]: the tests of this directory in the virtual machine. Where it can't boot: one line and exit 0,
# or exit 1 if REQUIRE_RDMA=1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHON=${PYTHON:-$here/../../.venv/bin/python}
cannot=0; [ "${REQUIRE_RDMA:-0}" = 1 ] && cannot=1
cache=$("$here/prepare.sh") || { code=$?; [ "$code" = 75 ] && exit "$cannot"; exit "$code"; }
code=0
"$here/vm.sh" "$cache" 150 true >"$cache/boot.log" 2>&1 || code=$?
if [ "$code" != 0 ]; then
  echo "test-rdma: the virtual machine does not boot here; see $cache/boot.log and $cache/console.log" >&2
  exit "$cannot"
fi
libucp=$(echo "$cache"/nixl-*/nixl_cu12.libs/libucp-*.so*)
cd "$here/../.."
# GID 0 is the link-local address: with another, soft-RoCE within one host does not work.
exec "$here/vm.sh" "$cache" "${RDMA_TIMEOUT_S:-1140}" env DISAGGKD_RDMA_GUEST=1 DISAGGKD_LIBUCP="$libucp" UCX_IB_GID_INDEX=0 \
  DISAGGKD_TEST_PATIENCE=8 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
  "$PYTHON" -m pytest -p no:cacheprovider -v -x --timeout=1000 --durations=0 "$@" tests/rdma
