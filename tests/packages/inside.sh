# A node with nothing but its system and fuse3 tries monarchfs, as root and as an ordinary user:
# inside.sh KIND PLACE (install.sh). What differs or fails ends it; the last line is "done".
. /tests/install.sh
kind=$1 place=$2

for program in cc gcc pip $([ $kind = wheels ] || echo python3); do
    ! command -v $program >/dev/null || { echo "there is $program"; exit 1; }
done
if (: >"$place/new") 2>/dev/null; then
    echo "$place can be written"
    exit 1
fi
prepare

# Everything that there is, without the file systems of the kernel, and the books of package managers.
everything() {
    find / /scratch /dev/shm -xdev ! -path '/proc/*' ! -path '/sys/*' ! -path '/var/log/*' \
        ! -path '/var/lib/dpkg/*' ! -path '/var/lib/rpm*' ! -path '/root/.rpmdb*' | sort
}
everything >/before

step install
install_it $kind "$place"

as_user() {
    (cd / && setpriv --reuid=1000 --regid=1000 --clear-groups env -i HOME=/home/user PATH="$PATH" "$@")
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
    worker=$(worker_of "$point" "$@")
    kill -9 "$worker"
    "$@" diff -r --no-dereference /lustre/data "$point"
    next=$(worker_of "$point" "$@")
    [ -n "$next" ] && [ "$next" != "$worker" ] || { echo "worker $worker, then $next"; exit 1; }
    "$@" monarchfs status "$point"
    libraries=$("$@" sed -n 's|.* \(/.*libfuse3.*\)|\1|p' "/proc/$next/maps" | sort -u)
    [ "$(echo "$libraries" | grep -c .)" = 1 ] || { echo "not one libfuse in the worker: $libraries"; exit 1; }
    "$@" monarchfs umount "$point"
    "$@" monarchfs cache remove --yes /lustre/data
}

step version
"$(readlink "$(command -v monarchfs)")" --version
monarchfs --version
cd "$(dirname "$(readlink "$(command -v monarchfs)")")" && ./monarchfs --version && cd /
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

step uninstall
uninstall $kind

step left
rmdir /scratch/root /scratch/user
everything >/after
diff /before /after | grep '^[<>]' | grep -v -x '> /after' || :
for process in /proc/[0-9]*; do
    if tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep '[m]onarchfs' | grep -v inside.sh; then
        echo "left: process ${process#/proc/}"
    fi
done
grep monarchfs /proc/mounts | grep -v -F "$(printf %s "$place" | sed 's/ /\\040/g')" || :
step done
