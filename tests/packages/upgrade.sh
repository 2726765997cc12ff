# Another release is installed on a node with a mount in use, and then the one before again: upgrade.sh KIND PLACE, where
# PLACE/old and PLACE/new have a package each. The last line is "done".
. /tests/install.sh
kind=$1 place=$2
prepare
mkdir -p /mnt/other /scratch/old /scratch/new

replace_by() {
    case $kind in
    deb) dpkg --install "$place/$1"/*.deb ;;
    rpm) rpm --upgrade --oldpackage --nodeps "$place/$1"/*.rpm ;;
    esac
}
# serves MOUNTPOINT VERSION: the worker is of that release, and so is the one that follows its death.
serves() {
    for round in 1 2 3; do
        worker=$(worker_of "$1")
        [ -n "$worker" ] || { echo "no worker serves $1" && exit 1; }
        case $(readlink "/proc/$worker/exe") in
        "/opt/monarchfs/$2"/*) ;;
        *) echo "$1 is served by $(readlink "/proc/$worker/exe"), not by $2" && exit 1 ;;
        esac
        kill -9 "$worker"
        diff -r --no-dereference /lustre/data "$1"
    done
}
# While it lives, a job reads, and workers are killed, also amid the installation.
read_on() {
    rounds=0
    while [ ! -e /stop ]; do
        cmp -s "$1/large" /lustre/data/large && cmp -s "$1/many/$((rounds % 200 + 1))" \
            "/lustre/data/many/$((rounds % 200 + 1))" || echo "wrong in round $rounds" >>/wrong
        rounds=$((rounds + 1))
    done
    echo $rounds >/rounds
}
kill_on() {
    while [ ! -e /stop ]; do
        kill -9 "$(worker_of "$1")" 2>/dev/null && echo killed >>/kills || :
        sleep 0.2
    done
}
# amid RELEASE MOUNTPOINT
amid() {
    rm -f /stop /kills /rounds
    read_on "$2" &
    reader=$!
    kill_on "$2" &
    killer=$!
    replace_by "$1"
    : >/stop
    wait $reader $killer
    echo "$(cat /rounds) rounds, $(wc -l </kills) kills"
}

# Somebody's own.
mkdir -p /opt/monarchfs/theirs
: >/opt/monarchfs/theirs/file

step install
install_it $kind "$place/old"
old=$(monarchfs --version | cut -d ' ' -f 2)
monarchfs mount /lustre/data /mnt/data --tier /scratch/old=64M
monarchfs warm /mnt/data --wait

step upgrade
amid new /mnt/data
new=$(monarchfs --version | cut -d ' ' -f 2)
[ "$new" != "$old" ]
ls /opt/monarchfs

step both
monarchfs mount /lustre/data /mnt/other --tier /scratch/new=64M --state-dir /var/cache/other
monarchfs restart /mnt/data
serves /mnt/data "$old"
serves /mnt/other "$new"
monarchfs status

step rollback
amid old /mnt/other
[ "$(monarchfs --version)" = "monarchfs $old" ]
serves /mnt/other "$new"
serves /mnt/data "$old"
ls /opt/monarchfs

step unused
monarchfs umount /mnt/other
replace_by new
monarchfs umount /mnt/data
replace_by old
ls /opt/monarchfs

step uninstall in use
monarchfs mount /lustre/data /mnt/data --tier /scratch/old=64M
worker=$(worker_of /mnt/data)
uninstall $kind
kill -9 "$worker"
diff -r --no-dereference /lustre/data /mnt/data
umount /mnt/data
replace_by old
uninstall $kind
ls /opt/monarchfs /opt/monarchfs/theirs

step wrong
cat /wrong 2>/dev/null || :
step done
