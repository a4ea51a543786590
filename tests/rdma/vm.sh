#!/usr/bin/env bash
# vm.sh CACHE SECONDS COMMAND...: run the command in a virtual machine that has two soft-RoCE devices, rxe0 and rxe1,
# joined by a virtual cable. Its output and exit code are the command's; 125: the machine did not boot or ran too long.
#
# The guest sees this machine's files read-only under a layer in memory: what it writes is gone afterwards. There is no
# network card. Software emulation does where there is no usable /dev/kvm: it is a rig for correctness, not for speed.
set -euo pipefail
cache=$1 limit_s=$2; shift 2
share=$(mktemp -d "$cache/run.XXXXXX"); trap 'rm -rf "$share"' EXIT
version=$(basename "$cache"/kernel/boot/vmlinuz-*); version=${version#vmlinuz-}

# --- initial file system: busybox and the modules in the order in which they have to be loaded ------------------------
initrd=$cache/initrd-$version-$(sha256sum "$0" | cut -c1-12).gz
if [ ! -e "$initrd" ]; then
  tree=$(mktemp -d "$cache/initrd.XXXXXX")
  mkdir -p "$tree"/{bin,proc,sys,dev,base,layer,root,modules}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  for module in virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic rdma_rxe ib_uverbs rdma_ucm veth sch_netem; do
    modprobe -d "$cache/kernel" -S "$version" --show-depends "$module" 2>/dev/null | awk '$1 == "insmod" {print $2}' || true
  done | awk '!seen[$0]++' | while read -r path; do
    name=$(basename "$path")
    case $name in *.xz) name=${name%.xz}; xz -dc "$path" >"$tree/modules/$name";; *) cp "$path" "$tree/modules/";; esac
    echo "$name" >>"$tree/modules/order"
  done
  cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin; export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "can't load $module"; done </modules/order
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,cache=loose,$options" files /base && mount -t tmpfs -o size=75% layer /layer && mkdir /layer/up /layer/work &&
  mount -t overlay -o lowerdir=/base,upperdir=/layer/up,workdir=/layer/work overlay /root &&
  mkdir -p /root/mnt/share && mount -t 9p -o "rw,$options" share /root/mnt/share || { echo "no root file system"; poweroff -f; }
for kept in proc sys dev; do mount --move "/$kept" "/root/$kept"; done
exec switch_root /root /bin/bash /mnt/share/guest
INIT
  chmod +x "$tree/init"
  (cd "$tree" && find . | cpio -o -H newc --quiet | gzip -1) >"$initrd.new" && mv "$initrd.new" "$initrd" && rm -rf "$tree"
fi

# --- what the guest does ----------------------------------------------------------------------------------------------
{ printf 'cd %q\nexport PATH=%q HOME=%q\n' "$PWD" "$PATH" "$HOME"; printf '%q ' "$@"; echo; } >"$share/command"
cat >"$share/guest" <<'GUEST'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs shm /dev/shm; mount -t tmpfs run /run
ln -sfn /proc/self/fd /dev/fd; ln -sfn fd/0 /dev/stdin; ln -sfn fd/1 /dev/stdout; ln -sfn fd/2 /dev/stderr
# Addresses are used as soon as they are set: nobody else is on the cable.
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad; ip link set lo up
ip link add v0 mtu 4500 type veth peer name v1 mtu 4500
for n in 0 1; do
  ip addr add "10.77.0.$((n + 1))/24" dev "v$n"; ip link set "v$n" up; rdma link add "rxe$n" type rxe netdev "v$n"
done
for port in /sys/class/virtio-ports/*; do [ "$(cat "$port/name")" = out ] && out=/dev/$(basename "$port"); done
ulimit -l unlimited; ulimit -c 0
bash /mnt/share/command </dev/null >"$out" 2>&1
echo $? >/mnt/share/code
sync; echo o >/proc/sysrq-trigger; sleep 60
GUEST

# --- boot -------------------------------------------------------------------------------------------------------------
# A /dev/kvm can be a nested one that runs no stock kernel: the processor has to have the extension as well.
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then machine=(-accel kvm -cpu host)
# Emulated AVX is slower than SSE.
else machine=(-accel tcg,thread=multi -cpu Nehalem); fi
code=0
timeout -k 5 "$limit_s" qemu-system-x86_64 -M q35 "${machine[@]}" -smp 2 -m "${DISAGGKD_RDMA_MIB:-6144}" \
  -nodefaults -no-reboot -display none -kernel "$cache/kernel/boot/vmlinuz-$version" -initrd "$initrd" \
  -serial "file:$cache/console.log" \
  -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable" \
  -device virtio-serial-pci -chardev file,id=out,path=/dev/fd/1,append=on -device virtserialport,chardev=out,nr=1,name=out \
  -virtfs local,path=/,mount_tag=files,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$share",mount_tag=share,security_model=none,multidevs=remap </dev/null | cat || code=$?
[ -s "$share/code" ] || { echo "test-rdma: the virtual machine left no exit code (qemu: $code; 124: ran past $limit_s s); see $cache/console.log" >&2; exit 125; }
exit "$(cat "$share/code")"
