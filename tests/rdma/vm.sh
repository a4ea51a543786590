#!/usr/bin/env bash
# vm.sh CACHE IMAGES SECONDS COMMAND...: run the command in a virtual machine that has four soft-RoCE devices: rxe0 and
# rxe1 are joined by a virtual cable, rxe2 and rxe3 by another. Its output and exit code are the command's; 125: the
# machine did not boot; 124: it ran too long.
#
# The guest sees this machine's files read-only under a layer in memory: what it writes is gone afterwards. There is no
# network card. Software emulation does where there is no usable /dev/kvm: it is a rig for correctness, not for speed.
#
# Shared files cost an emulated machine a millisecond for every look at a name, and importing torch is ten thousands of
# them. So the directories that the file IMAGES names (a line each: image, directory) are disks that lie over them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=$1 images=$2 limit_s=$3; shift 3
boot_limit_s=150
version=$(basename "$cache"/kernel/boot/vmlinuz-*); version=${version#vmlinuz-}
share=$(mktemp -d "$cache/run.XXXXXX") machine_pid=
end() {
  [ -z "$machine_pid" ] || kill -KILL "$machine_pid" 2>/dev/null || true
  [ ! -e "$share/console.log" ] || mv "$share/console.log" "$cache/console.log"
  rm -rf "$share"
}
trap end EXIT; trap 'exit 143' TERM INT HUP

# --- initial file system: busybox and the modules in the order in which they have to be loaded ------------------------
# Named by what it is made of, made aside, and not taken away for a month: another checkout may boot with its own meanwhile.
initrd=$cache/initrd-$version-$(sha256sum "$0" | cut -c1-12).gz
if [ ! -e "$initrd" ]; then
  find "$cache" -maxdepth 1 -name 'initrd-*' -mtime +30 -exec rm -rf {} +
  tree=$share/tree
  mkdir -p "$tree"/{bin,proc,sys,dev,base,layer,root,modules}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  for module in virtio_pci virtio_console virtio_blk 9pnet_virtio 9p overlay erofs crc32_generic rdma_rxe ib_uverbs rdma_ucm veth sch_netem; do
    modprobe -d "$cache/kernel" -S "$version" --show-depends "$module" 2>/dev/null | awk '$1 == "insmod" {print $2}' || true
  done | awk '!seen[$0]++' | while read -r path; do
    name=$(basename "$path")
    case $name in *.xz) name=${name%.xz}; xz -dc "$path" >"$tree/modules/$name";;
      *.zst) name=${name%.zst}; zstd -dcq "$path" >"$tree/modules/$name";; *) cp "$path" "$tree/modules/";; esac
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
  (cd "$tree" && find . | cpio -o -H newc --quiet | gzip -1) >"$share/initrd.gz" && mv "$share/initrd.gz" "$initrd" && rm -rf "$tree"
fi

# --- what the guest does ----------------------------------------------------------------------------------------------
{ printf 'cd %q\nexport PATH=%q HOME=%q TMPDIR=/run/tmp\n' "$PWD" "$PATH" "$HOME"; printf '%q ' "$@"; echo; } >"$share/command"
cat >"$share/guest" <<'GUEST'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs shm /dev/shm; mount -t tmpfs run /run; mkdir /run/tmp
ln -sfn /proc/self/fd /dev/fd; ln -sfn fd/0 /dev/stdin; ln -sfn fd/1 /dev/stdout; ln -sfn fd/2 /dev/stderr
while read -r disk directory; do
  echo 2048 >"/sys/block/$disk/queue/read_ahead_kb"; mount -t erofs -o ro "/dev/$disk" "$directory"
done </mnt/share/disks
# A cable loses what its receiver has no room for; RDMA expects one that does not.
echo 100000 >/proc/sys/net/core/netdev_max_backlog
# Addresses are used as soon as they are set: nobody else is on the cable.
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad; ip link set lo up
for cable in 0 2; do
  ip link add "v$cable" mtu 4500 type veth peer name "v$((cable + 1))" mtu 4500
  for n in $cable $((cable + 1)); do
    ip addr add "10.77.$cable.$n/24" dev "v$n"; ip link set "v$n" up; rdma link add "rxe$n" type rxe netdev "v$n"
  done
done
for port in /sys/class/virtio-ports/*; do [ "$(cat "$port/name")" = out ] && out=/dev/$(basename "$port"); done
ulimit -l unlimited; ulimit -c 0
echo "booted in $(cut -d' ' -f1 /proc/uptime) s" >/mnt/share/booted
bash /mnt/share/command </dev/null >"$out" 2>&1
echo $? >/mnt/share/code
sync; echo o >/proc/sysrq-trigger; sleep 60
GUEST
drives=(-object iothread,id=disks); letters=(a b c d e f); : >"$share/disks"
while read -r image directory; do
  disk=vd${letters[0]}; letters=("${letters[@]:1}")
  drives+=(-drive "file=$image,id=$disk,if=none,format=raw,readonly=on" -device "virtio-blk-pci,drive=$disk,iothread=disks")
  echo "$disk $directory" >>"$share/disks"
done <"$images"

# --- boot -------------------------------------------------------------------------------------------------------------
# A /dev/kvm can be a nested one that runs no stock kernel: the processor has to have the extension as well.
clock=
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then machine=(-accel kvm -cpu host)
# Emulated AVX is slower than SSE.
else machine=(-accel tcg,thread=multi -cpu Nehalem) clock="tsc=reliable tsc_early_khz=$("${PYTHON:-python3}" "$here/tsc_khz.py")"; fi
exec 3> >(cat); printer_pid=$!  # a pipe, whatever our output is: it is opened by name
qemu-system-x86_64 -M q35 "${machine[@]}" -smp 2 -m "${DISAGGKD_RDMA_MIB:-6144}" \
  -nodefaults -no-reboot -display none -kernel "$cache/kernel/boot/vmlinuz-$version" -initrd "$initrd" \
  -serial "file:$share/console.log" \
  -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr no_timer_check $clock" \
  -device virtio-serial-pci -chardev file,id=out,path=/dev/fd/1,append=on -device virtserialport,chardev=out,nr=1,name=out \
  "${drives[@]}" \
  -virtfs local,path=/,mount_tag=files,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$share",mount_tag=share,security_model=none,multidevs=remap </dev/null >&3 3>&- &
machine_pid=$!
exec 3>&-
for ((second = 0; second < limit_s; second++)); do
  kill -0 "$machine_pid" 2>/dev/null || break
  if [ "$second" = "$boot_limit_s" ] && [ ! -e "$share/booted" ]; then break; fi
  sleep 1
done
kill -KILL "$machine_pid" 2>/dev/null || true; wait "$machine_pid" "$printer_pid" 2>/dev/null || true; machine_pid=
if [ -e "$share/booted" ]; then code=124; else code=125; fi
if [ -s "$share/code" ]; then code=$(cat "$share/code")
elif [ "$code" = 124 ]; then echo "test-rdma: the virtual machine was ended, or ran for more than $limit_s s; see $cache/console.log" >&2; fi
exit "$code"
