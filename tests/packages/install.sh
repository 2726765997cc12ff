# How monarchfs gets onto a node, and off it again: install KIND PLACE, uninstall KIND PLACE, where PLACE has what is
# brought. For the scripts here, which run in the root of a node with nothing but its system and fuse3.
set -eu

step() { echo "== $*"; }

install_it() {
    case $1 in
    bundle)
        ln -s "$2/bin/monarchfs" /usr/local/bin/monarchfs
        ln -s "$2/bin/mount.monarchfs" /sbin/mount.monarchfs
        ;;
    deb) dpkg --install "$2"/*.deb ;;
    rpm) rpm --install --nodeps "$2"/*.rpm ;; # the node's packages are Debian's
    wheels)
        python3 -m venv /opt/monarchfs
        /opt/monarchfs/bin/pip install --quiet --no-index --find-links "$2" monarchfs
        ln -s /opt/monarchfs/bin/monarchfs /usr/local/bin/monarchfs
        ln -s /opt/monarchfs/bin/mount.monarchfs /sbin/mount.monarchfs
        ;;
    esac
}

uninstall() {
    case $1 in
    bundle) rm /usr/local/bin/monarchfs /sbin/mount.monarchfs ;;
    deb) dpkg --purge monarchfs ;;
    rpm) rpm --erase monarchfs ;;
    wheels) rm -r /usr/local/bin/monarchfs /sbin/mount.monarchfs /opt/monarchfs ;;
    esac
}

# A dataset and a tier in memory.
prepare() {
    mkdir -p /lustre/data/many /scratch /home/user/mnt /mnt/data
    mount -t tmpfs -o mode=1777 scratch /scratch
    useradd --uid 1000 --home-dir /home/user user
    for number in $(seq 200); do head -c $((number * 331)) /dev/urandom >"/lustre/data/many/$number"; done
    head -c 9000000 /dev/urandom >/lustre/data/large
    ln -s many/7 /lustre/data/link
    chmod 640 /lustre/data/many/9
    chown -R user /home/user /lustre/data
    ln -sf ../proc/self/mounts /etc/mtab # what debootstrap leaves to systemd
}

# worker_of MOUNTPOINT [WHO...]: its process.
worker_of() {
    of=$1
    shift
    "$@" monarchfs status --json "$of" | tr -d '\n' |
        sed -n 's/.*"worker": *{[^}]*"pid": *\([0-9]*\).*/\1/p'
}
