# Of a package's scripts: a mount stays with the release that it began with. So the directory of a
# release stays while processes run from it, although the package manager removes its files.
set -eu
place=/opt/monarchfs

# in_use DIRECTORY: whether a process runs from it. The kernel names removed files, too.
in_use() {
    for process in /proc/[0-9]*/exe; do
        case $(readlink "$process" || :) in
        "$1"/*) return 0 ;;
        esac
    done
    return 1
}

# Before files are removed.
keep() {
    ! in_use @RELEASE@ || [ -e @RELEASE@.kept ] || cp -a --link @RELEASE@ @RELEASE@.kept
}

# After files were removed or others installed: a kept release comes back, with the mark `.kept`. A release
# with the mark goes when no process uses it. Nothing else in the place is touched.
tidy() {
    for kept in "$place"/*.kept; do
        [ -d "$kept" ] || continue
        if [ -e "${kept%.kept}/bin" ]; then
            rm -r "$kept"
        else
            rm -rf "${kept%.kept}"
            mv "$kept" "${kept%.kept}"
            : >"${kept%.kept}/.kept"
        fi
    done
    current=$(readlink /usr/bin/monarchfs || :)
    for mark in "$place"/*/.kept; do
        [ -e "$mark" ] || continue
        release=${mark%/.kept}
        case $current in
        "$release"/*) rm "$mark" ;;
        *)
            if in_use "$release"; then
                echo "monarchfs: $release stays: processes run from it; the next installation removes it" >&2
            else
                rm -r "$release"
            fi
            ;;
        esac
    done
    rmdir "$place" 2>/dev/null || :
    [ ! -d /run/systemd/system ] || systemctl daemon-reload || :
}
