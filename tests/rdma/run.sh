#!/usr/bin/env bash
# run.sh [PYTEST_ARGS...]: the tests of this directory in the virtual machine, within RDMA_LIMIT_S seconds (1180) from
# now on. Where it can't boot: one line and exit 0, or exit 1 if REQUIRE_RDMA=1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHON=${PYTHON:-$here/../../.venv/bin/python}
cannot=0; [ "${REQUIRE_RDMA:-0}" = 1 ] && cannot=1
images=$(mktemp); trap 'rm -f "$images"' EXIT
cache=$("$here/prepare.sh" "$images") || { code=$?; [ "$code" = 75 ] && exit "$cannot"; exit "$code"; }
libucp=$(echo "$cache"/nixl-*/nixl_cu12.libs/libucp-*.so*)
cd "$here/../.."
code=0
# GID 0 is the link-local address: with another, soft-RoCE within one host does not work.
# A process takes longer to start in the emulated machine than a channel may take to open: addresses are trusted there.
# Plugins of pytest are named, since looking for them takes seconds.
"$here/vm.sh" "$cache" "$images" $((${RDMA_LIMIT_S:-1180} - SECONDS)) env DISAGGKD_RDMA_GUEST=1 DISAGGKD_LIBUCP="$libucp" UCX_IB_GID_INDEX=0 DISAGGKD_UCX_TRUST=1 \
  DISAGGKD_TEST_PATIENCE=4 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 \
  PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=pytest_timeout \
  "$PYTHON" -m pytest -v --timeout=900 --durations=0 --durations-min=1 "$@" tests/rdma || code=$?
if [ "$code" = 125 ]; then
  echo "test-rdma: nothing was tested: the virtual machine does not boot here; see $cache/console.log" >&2
  exit "$cannot"
fi
exit "$code"
