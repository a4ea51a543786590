#!/usr/bin/env bash
# What the virtual machine needs, fetched or made once and cached: a kernel with soft-RoCE, a UCX with verbs, and disks
# with all that Python imports from.
# Prints the cache directory; exit 75 and one line if something can't be had here.
set -euo pipefail
cache=${DISAGGKD_RDMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/disaggkd/rdma}
python=${PYTHON:-python3}
nixl_version=1.5.1

give_up() { echo "test-rdma: nothing was tested: $*" >&2; exit 75; }

[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] || give_up "needs Linux on x86-64, this is $(uname -s) on $(uname -m)"
mkdir -p "$cache" 2>/dev/null || give_up "can't write $cache; name another place with DISAGGKD_RDMA_CACHE"

# --- programs --------------------------------------------------------------------------------------------------------
missing=()
for need in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static modprobe:kmod cpio:cpio \
  ip:iproute2 rdma:iproute2 tc:iproute2 mkfs.erofs:erofs-utils; do
  command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
done
[ -e /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so ] || ls /usr/lib/x86_64-linux-gnu/libibverbs/librxe-* >/dev/null 2>&1 ||
  missing+=(ibverbs-providers rdma-core)
if [ ${#missing[@]} -gt 0 ]; then
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || give_up "install first: ${missing[*]}"
  (apt-get -qq update || true; DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}") \
    >"$cache/apt.log" 2>&1 || give_up "could not install ${missing[*]}; see $cache/apt.log"
fi

# --- kernel: the distribution's, unpacked and not installed -----------------------------------------------------------
kernel=$cache/kernel
if ! ls "$kernel"/boot/vmlinuz-* >/dev/null 2>&1; then
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ {print $2; exit}')
  [ -n "$package" ] || give_up "apt knows no linux-image-amd64 to take a kernel from"
  rm -rf "$kernel.new" && mkdir -p "$kernel.new"
  (cd "$cache" && apt-get -qq download "$package") >"$cache/kernel.log" 2>&1 || give_up "could not download $package; see $cache/kernel.log"
  dpkg-deb -x "$cache/$package"_*.deb "$kernel.new" && rm -f "$cache/$package"_*.deb
  [ -d "$kernel.new/lib/modules" ] || ln -s usr/lib "$kernel.new/lib"
  depmod -b "$kernel.new" "$(basename "$kernel.new"/boot/vmlinuz-* | sed 's/^vmlinuz-//')"
  mv "$kernel.new" "$kernel"
fi

# --- UCX with verbs: the one inside nixl's wheel, made to use the system's libibverbs, which has the soft-RoCE provider --
ucx=$cache/nixl-$nixl_version
if [ ! -e "$ucx/done" ]; then
  rm -rf "$ucx" && mkdir -p "$ucx/wheel"
  "$python" -m pip download -q --disable-pip-version-check --no-deps -d "$ucx/wheel" "nixl-cu12==$nixl_version" >"$cache/nixl.log" 2>&1 ||
    give_up "could not download nixl-cu12==$nixl_version; see $cache/nixl.log"
  "$python" - "$ucx" <<'PY'
import pathlib, sys, zipfile
root = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next((root / "wheel").glob("*.whl"))) as wheel:
    for name in wheel.namelist():
        if ".libs/" in name:
            wheel.extract(name, root)
PY
  rm -rf "$ucx/wheel"
  for private in "$ucx"/nixl_cu12.libs/libibverbs-*.so.*; do ln -sf /usr/lib/x86_64-linux-gnu/libibverbs.so.1 "$private"; done
  touch "$ucx/done"
fi

# --- disks: the standard library and the installed packages; see vm.sh. Made anew when a package was installed --------
mkdir -p "$cache/disks"; : >"$cache/images.new"
"$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sep="\n")' | while read -r directory; do
  made_of=$({ echo "$directory"; "$python" -VV; find "$directory" -maxdepth 1 -name '*.dist-info' -printf '%f %T@\n' | sort; } | sha256sum)
  image=$cache/disks/${made_of:0:16}.erofs
  if [ ! -e "$image" ]; then
    # Without headers, and without what only checks or draws.
    mkfs.erofs --quiet --preserve-mtime -x-1 \
      --exclude-regex='^(site-packages/|test/|(mypy|mypyc|libucx|pip|matplotlib|fontTools|torch/include)(/|$))' \
      "$image.new" "$directory" >"$cache/disks.log" 2>&1 || give_up "could not make $image; see $cache/disks.log"
    mv "$image.new" "$image"
  fi
  echo "$image $directory" >>"$cache/images.new"
done
mv "$cache/images.new" "$cache/images"
for image in "$cache"/disks/*; do grep -qF "$image " "$cache/images" || rm -f "$image"; done
echo "$cache"
