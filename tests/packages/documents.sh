# What the documents' commands find: datasets, tiers in memory, a user, the bundle in $HOME and in /opt, and programs
# that a cluster has, as far as these commands need them. `block NAME KIND` runs one that standard input has.
. /tests/install.sh
programs=$1 repository=$2

files=/lustre/imagenet/train/n01440764
mkdir -p $files /lustre/photos/a /lustre/data /lustre/scratch/alice /mnt/lustre2 /mnt/photos /mnt/imagenet /scratch /local \
    /root/job
for number in $(seq 10026 10060); do head -c $((number * 3)) /dev/urandom >"$files/n01440764_$number.JPEG"; done
for file in $files/*; do cp "$file" "/lustre/photos/a/$(basename "$file" .JPEG).jpg"; done
truncate -s 29M /lustre/photos/embeddings.bin
cp -r /lustre/imagenet /lustre/data
for tier in /scratch /dev/shm; do mount -t tmpfs -o mode=1777,size=256M tier $tier; done
mount --bind /lustre /mnt/lustre2
python3 -c 'import fcntl, socket, struct  # lo is up: SIOCSIFFLAGS, IFF_UP
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1) + bytes(22))'
useradd --create-home alice
chown alice /lustre/scratch/alice
printf '%s\n' 'roots = ["/lustre/data"]' 'tier = ["/local/monarchfs=64M"]' >/etc/monarchfs-slurm.toml
echo "a key that nodes share, for tests" >/etc/monarchfs-peers.key
chmod 600 /etc/monarchfs-peers.key
mkdir -p /usr/local/lib/monarchfs /usr/local/share/zsh/site-functions /etc/bash_completion.d \
    /root/.config/fish/completions
cp -r "$repository/slurm" /usr/local/lib/monarchfs

# program NAME: what standard input has.
program() { cat >"/usr/local/bin/$1" && chmod 755 "/usr/local/bin/$1"; }
program srun <<'END'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
cp train.py /tmp && cd /home/alice && cp /tmp/train.py . && exec sudo -u alice "$@"
END
program sudo <<'END'
#!/bin/sh
user=root
[ "$1" != -u ] || { user=$2 && shift 2; }
exec setpriv --reuid="$user" --regid="$(id -g "$user")" --init-groups env HOME="$(eval echo ~$user)" "$@"
END
program scontrol <<'END'
#!/bin/sh
exit 1
END
program python <<'END'
#!/bin/sh
exec python3 "$@"
END
program curl <<'END'
#!/usr/bin/python3
import sys, time, urllib.request
for attempt in range(300):
    try:
        sys.exit(sys.stdout.write(urllib.request.urlopen(sys.argv[-1]).read().decode()) == 0)
    except OSError:
        time.sleep(0.1)
END

# What is installed is the bundle, where it was made; else programs that run the tests' own.
bundle=$(find "$repository/dist" -name 'monarchfs-*-linux-*.tar.gz' 2>/dev/null | tail -n 1)
install_releases() {
    for release in 0.1.0 0.2.0; do
        place=/opt/monarchfs-$release-linux-x86_64
        [ ! -e "$place" ] || continue
        mkdir -p "$place/bin"
        if [ -n "$bundle" ]; then
            tar -x -f "$bundle" -C "$place" --strip-components=1
        else
            for program in monarchfs mount.monarchfs; do
                printf '#!/bin/sh\nexec "%s/%s" "$@"\n' "$programs" $program >"$place/bin/$program"
                chmod 755 "$place/bin/$program"
            done
        fi
        tar -cz -C /opt -f "/root/job/${place#/opt/}.tar.gz" "${place#/opt/}"
    done
}

failed=
# The mounts that a block speaks of and does not make are there; links are as on a new node.
block() {
    step "$1"
    cat >/tmp/block
    rm -rf /opt/monarchfs /usr/local/bin/monarchfs /sbin/mount.monarchfs
    install_releases
    ln -s /opt/monarchfs-0.1.0-linux-x86_64 /opt/monarchfs
    ln -s /opt/monarchfs/bin/mount.monarchfs /sbin
    ln -s /opt/monarchfs/bin/monarchfs /usr/local/bin
    ln -sf /opt/monarchfs/bin/monarchfs /usr/bin
    for dataset in photos imagenet; do
        if grep -q "/mnt/$dataset" /tmp/block && ! grep -q "mount .*/lustre/$dataset /mnt/" /tmp/block; then
            monarchfs mount /lustre/$dataset /mnt/$dataset --tier /scratch=50%
        fi
    done
    ! grep -q '^ln -s' /tmp/block || rm /usr/local/bin/monarchfs /sbin/mount.monarchfs
    printf 'import os, sys\n[open(os.path.join(at, name), "rb").read() for path in sys.argv[1:] %s]\n' \
        'for at, _, names in os.walk(path) for name in names' >/root/job/train.py
    (cd /root/job && timeout -k 1 60 bash -e -u -o pipefail /tmp/block) || failed="$failed, $1"
    for dataset in photos imagenet; do
        ! mountpoint -q /mnt/$dataset || /opt/monarchfs/bin/monarchfs umount /mnt/$dataset
    done
}
