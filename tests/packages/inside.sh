# A node with nothing but its system and fuse3 tries the bundle, as root and as an ordinary user:
# inside.sh BUNDLE, in the root of that node. What differs or fails ends it; the last line is "done".
set -eu
bundle=$1
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

step() { echo "== $*"; }

for program in python3 cc gcc perl-cc pip; do
    ! command -v $program >/dev/null || { echo "there is $program"; exit 1; }
done
if (: >"$bundle/new") 2>/dev/null; then
    echo "$bundle can be written"
    exit 1
fi

mkdir -p /lustre/data/many /scratch /home/user/mnt /mnt/data
mount -t tmpfs -o mode=1777 scratch /scratch
useradd --uid 1000 --home-dir /home/user user
for number in $(seq 200); do head -c $((number * 331)) /dev/urandom >"/lustre/data/many/$number"; done
head -c 9000000 /dev/urandom >/lustre/data/large
ln -s many/7 /lustre/data/link
chmod 640 /lustre/data/many/9
chown -R user /home/user /lustre/data
ln -s ../proc/self/mounts /etc/mtab # what debootstrap leaves to systemd
ln -s "$bundle/bin/monarchfs" /usr/local/bin/monarchfs
ln -s "$bundle/bin/mount.monarchfs" /sbin/mount.monarchfs

# Everything that there is, without the file systems of the kernel.
everything() {
    find / /scratch /dev/shm -xdev ! -path '/proc/*' ! -path '/sys/*' | sort
}
everything >/before

as_user() {
    (cd / && setpriv --reuid=1000 --regid=1000 --clear-groups env -i HOME=/home/user PATH="$PATH" "$@")
}
worker_of() {
    "$@" monarchfs status --json "$point" | tr -d '\n' |
        sed -n 's/.*"worker": *{[^}]*"pid": *\([0-9]*\).*/\1/p'
}
compare() {
    diff -r --no-dereference /lustre/data "$point" || exit 1
}
# tried WHO...: the mount at $point, as WHO runs commands.
tried() {
    step "$point${1:+ $1}"
    "$@" monarchfs mount /lustre/data "$point" --tier "$tier=64M"
    "$@" monarchfs warm "$point" --wait
    "$@" diff -r --no-dereference /lustre/data "$point"
    worker=$(worker_of "$@")
    kill -9 "$worker"
    "$@" diff -r --no-dereference /lustre/data "$point"
    next=$(worker_of "$@")
    [ -n "$next" ] && [ "$next" != "$worker" ] || { echo "worker $worker, then $next"; exit 1; }
    "$@" monarchfs status "$point"
    case $("$@" cat "/proc/$next/maps") in
    *libfuse3*) ;;
    *) echo "no libfuse3 in the worker" && exit 1 ;;
    esac
    "$@" monarchfs umount "$point"
    "$@" monarchfs cache remove --yes /lustre/data
}

step version
"$bundle/bin/monarchfs" --version
monarchfs --version
cd "$bundle/bin" && ./monarchfs --version && cd /
step doctor
monarchfs doctor /lustre/data
step doctor as a user
as_user monarchfs doctor /lustre/data

point=/mnt/data tier=/scratch/root
mkdir /scratch/root
tried
point=/home/user/mnt tier=/scratch/user
install -d -o user /scratch/user
tried as_user

step mount -t monarchfs
point=/mnt/data
mount -t monarchfs /lustre/data /mnt/data -o tier=/scratch/root=64M
compare
umount /mnt/data
monarchfs cache remove --yes /lustre/data

step run
as_user monarchfs run /lustre/data --tier /scratch/user=64M -- sh -c 'cksum /lustre/data/large; findmnt -no FSTYPE /lustre/data'
cksum /lustre/data/large
for try in $(seq 100); do
    as_user monarchfs cache remove --yes /lustre/data 2>/dev/null && break
    sleep 0.1
done

step left
rmdir /scratch/root /scratch/user
everything >/after
diff /before /after | grep '^[<>]' | grep -v -x '> /after' || :
for process in /proc/[0-9]*; do
    if tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep monarchfs | grep -v inside.sh; then
        echo "left: process ${process#/proc/}"
    fi
done
grep monarchfs /proc/mounts | grep -v -F "$(printf %s "$bundle" | sed 's/ /\\040/g')" || :
step done
