#!/usr/bin/env bash
# prepare.sh [IMAGES]: what the virtual machine needs, fetched or made once and cached: a kernel with soft-RoCE, a UCX with
# verbs, and, where a file IMAGES is to name them, disks with all that Python imports from.
# Prints the cache directory; exit 75 and one line if something can't be had here.
set -euo pipefail
cache=${DISAGGKD_RDMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/disaggkd/rdma}
python=${PYTHON:-python3}
nixl_version=1.5.1

give_up() { echo "test-rdma: nothing was tested: $*" >&2; exit 75; }

[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] || give_up "needs Linux on x86-64, this is $(uname -s) on $(uname -m)"
mkdir -p "$cache" 2>/dev/null || give_up "can't write $cache; name another place with DISAGGKD_RDMA_CACHE"
# Checkouts share the cache; one at a time makes what is missing.
exec 9>"$cache/lock"
flock -w 900 9 || give_up "somebody else has been at $cache for 15 minutes"

# --- programs --------------------------------------------------------------------------------------------------------
# Lists of packages may be old, or missing as in a fresh container.
may_install() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }
update_lists() { if may_install; then apt-get -qq update >"$cache/apt-update.log" 2>&1 || true; fi; }
install() {
  may_install || give_up "install first: $*"
  update_lists
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >"$cache/apt.log" 2>&1 ||
    give_up "could not install $*; see $cache/apt.log"
}
missing=()
for need in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static modprobe:kmod cpio:cpio \
  ip:iproute2 rdma:iproute2 tc:iproute2 mkfs.erofs:erofs-utils; do
  command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
done
[ -e /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so ] || ls /usr/lib/x86_64-linux-gnu/libibverbs/librxe-* >/dev/null 2>&1 ||
  missing+=(ibverbs-providers rdma-core)
if [ ${#missing[@]} -gt 0 ]; then
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  install "${missing[@]}"
fi

# --- kernel: the distribution's, unpacked and not installed -----------------------------------------------------------
kernel=$cache/kernel
# The package's name, or nothing: Debian's, or Ubuntu's.
kernel_package() {
  for meta in linux-image-amd64 linux-image-generic; do
    apt-cache depends "$meta" 2>/dev/null || true
  done | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ && !found++ {print $2}'
}
if ! ls "$kernel"/boot/vmlinuz-* >/dev/null 2>&1; then
  command -v apt-cache >/dev/null && command -v dpkg-deb >/dev/null || give_up "needs apt-get and dpkg-deb to take a kernel from"
  package=$(kernel_package)
  [ -n "$package" ] || { update_lists; package=$(kernel_package); }
  [ -n "$package" ] || give_up "apt knows no linux-image-amd64 or linux-image-generic to take a kernel from; try apt-get update"
  packages=("$package")
  # Ubuntu's modules are packages of their own; soft-RoCE is in the second.
  case $package in *-generic) packages+=("${package/-image-/-modules-}" "${package/-image-/-modules-extra-}");; esac
  rm -rf "$kernel.new" "$kernel.packages" && mkdir -p "$kernel.new" "$kernel.packages"
  download() { (cd "$kernel.packages" && apt-get -qq download "${packages[@]}") >"$cache/kernel.log" 2>&1; }
  # What the lists name may be gone already.
  download || { update_lists; download; } || give_up "could not download ${packages[*]}; see $cache/kernel.log"
  for file in "$kernel.packages"/*.deb; do
    dpkg-deb -x "$file" "$kernel.new" >>"$cache/kernel.log" 2>&1 || give_up "could not unpack $file; see $cache/kernel.log"
  done
  rm -rf "$kernel.packages"
  [ -d "$kernel.new/lib/modules" ] || ln -s usr/lib "$kernel.new/lib"
  depmod -b "$kernel.new" "$(basename "$kernel.new"/boot/vmlinuz-* | sed 's/^vmlinuz-//')"
  mv "$kernel.new" "$kernel"
fi
# As newer distributions pack their modules; vm.sh unpacks them.
if find "$kernel/lib/modules/" -name '*.ko.zst' | grep -q . && ! command -v zstd >/dev/null; then install zstd; fi

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
[ $# = 1 ] || { echo "$cache"; exit 0; }
mkdir -p "$cache/disks"; : >"$1"
"$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sep="\n")' | while read -r directory; do
  made_of=$({ echo "$directory"; "$python" -VV; find "$directory" -maxdepth 1 -name '*.dist-info' -printf '%f %T@\n' | sort; } | sha256sum)
  of=$(echo "$directory" | sha256sum)
  image=$cache/disks/${of:0:16}-${made_of:0:16}.erofs
  if [ ! -e "$image" ]; then
    # Without headers, and without what only checks or draws.
    mkfs.erofs --quiet --preserve-mtime -x-1 \
      --exclude-regex='^(site-packages/|test/|(mypy|mypyc|libucx|pip|matplotlib|fontTools|torch/include)(/|$))' \
      "$image.new" "$directory" >"$cache/disks.log" 2>&1 || give_up "could not make $image; see $cache/disks.log"
    mv "$image.new" "$image"
    # What it held before. A machine that has it open keeps it.
    for other in "$cache/disks/${of:0:16}"-*; do [ "$other" = "$image" ] || rm -f "$other"; done
  fi
  touch "$image"
  echo "$image $directory" >>"$1"
done
# Of checkouts that are gone; and what is called as no image is any more.
find "$cache/disks" -type f \( -mtime +30 -o ! -name '*-*.erofs' \) -delete
echo "$cache"
