"""Directory trees with everything a mirror can get wrong, and their comparison."""

import os
import random
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

COMPARED = (
    *("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns"),
    *("st_rdev", "st_blocks", "st_blksize"),
)


def random_bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def write_files(root: Path, contents: Mapping[str, bytes]) -> Path:
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def dataset(root: Path, files: int = 40, largest: int = 3 << 20, seed: int = 1) -> dict[str, bytes]:
    rng = random.Random(seed)
    contents: dict[str, bytes] = {}
    for number in range(files):
        size = int(largest ** rng.random()) if number else largest
        path = f"class{number % 4}/sample{number:04d}.bin"
        contents[path] = rng.randbytes(size)
    write_files(root, contents)
    return contents


def strange_tree(root: Path) -> None:
    """Names, types, modes and sizes at the edges. As root also owners, devices and ACLs."""
    (root / "plain.txt").write_bytes(b"hello\n")
    (root / "empty").touch()
    for name in (b"\xff\xfe\x01", b"new\nline", b"-rf", b" ", b"x" * 255, "größe ☃".encode()):
        with open(os.fsencode(root) + b"/" + name, "wb") as file:
            file.write(name)
    deep = os.fsencode(root)
    while len(deep) + 201 < 4000:
        deep += b"/" + b"d" * 200
        os.mkdir(deep)
    with open(deep + b"/" + b"f" * (4095 - len(deep) - 1), "wb") as file:
        file.write(b"at the end of a long path")
    (root / "absolute").symlink_to("/etc/hostname")
    (root / "dangling").symlink_to("nowhere/at all")
    (root / "outside").symlink_to("../../../../../..")
    (root / "long link").symlink_to("y" * 4095)
    (root / "linked").write_bytes(b"two names")
    os.link(root / "linked", root / "hard")
    (root / "sub").mkdir()
    os.link(root / "linked", root / "sub" / "hard too")
    with open(root / "sparse", "wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"an island")
    (root / "unaligned").write_bytes(random_bytes((1 << 20) + 12345, 7))
    for mode in (0o000, 0o111, 0o444, 0o4755, 0o2755, 0o1777, 0o640):
        path = root / f"mode{mode:o}"
        path.write_bytes(b"m")
        path.chmod(mode)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    os.utime(root / "plain.txt", ns=(1, 999_999_999))
    os.utime(root / "empty", ns=(-1_500_000_001, -1_500_000_001))
    for year, ns in (("2286", 10**19), ("1938", -(10**18))):
        (root / year).write_text(year)
        os.utime(root / year, ns=(ns, ns + 7))
    os.mkfifo(root / "fifo")
    os.mknod(root / "socket", stat.S_IFSOCK | 0o755)
    os.setxattr(root / "plain.txt", "user.colour", b"blue\0green")
    if os.geteuid() == 0:
        (root / "of nobody").write_bytes(b"n")
        os.chown(root / "of nobody", 65534, 12345)
        os.mknod(root / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (root / "with acl").write_bytes(b"acl")
        subprocess.run(["setfacl", "-m", "u:65534:r", str(root / "with acl")], check=True)


def walk(root: bytes) -> Iterator[bytes]:
    """All paths below ``root``, relative to it, also longer than PATH_MAX allows in one piece."""

    def fail(error: OSError) -> None:
        raise error

    for directory, below, files, _fd in os.fwalk(root, onerror=fail):
        below.sort()
        for name in sorted([*below, *files]):
            yield os.path.join(directory, name)[len(root) + 1 :]


def content(path: bytes) -> bytes | str:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as exc:
        return f"error {exc.errno}"


def attributes(path: bytes) -> dict[str, object]:
    st = os.lstat(path)
    found: dict[str, object] = {name: getattr(st, name) for name in COMPARED}
    found["access"] = [os.access(path, mode) for mode in (os.X_OK, os.R_OK | os.X_OK)]
    if stat.S_ISLNK(st.st_mode):
        found["target"] = os.readlink(path)
    names = os.listxattr(path, follow_symlinks=False)
    found["xattrs"] = {n: os.getxattr(path, n, follow_symlinks=False) for n in sorted(names)}
    return found


def kinds(directory: bytes) -> dict[bytes, tuple[bool, bool, bool]]:
    with os.scandir(directory) as entries:
        return {
            entry.name: (entry.is_dir(follow_symlinks=False), entry.is_symlink(),
                         entry.is_file(follow_symlinks=False))
            for entry in entries
        }  # fmt: skip


def differences(source: Path, mount: Path, *, contents: bool = True) -> list[str]:
    """What a reader could tell apart; [] where the mirror is true."""
    a, b = os.fsencode(source), os.fsencode(mount)
    found = []
    names_a, names_b = list(walk(a)), list(walk(b))
    if names_a != names_b:
        found.append(f"names differ: {sorted(set(names_a) ^ set(names_b))[:5]}")
    links: dict[tuple[int, int], int] = {}
    for name in names_a:
        path_a, path_b = a + b"/" + name, b + b"/" + name
        if len(path_a) > 4095 or len(path_b) > 4095:
            continue
        here, there = attributes(path_a), attributes(path_b)
        if here != there:
            changed = {k: (here.get(k), there.get(k)) for k in here if here[k] != there.get(k)}
            found.append(f"{name!r}: {changed}")
        st_a, st_b = os.lstat(path_a), os.lstat(path_b)
        if links.setdefault((st_a.st_dev, st_a.st_ino), st_b.st_ino) != st_b.st_ino:
            found.append(f"{name!r}: hard links have different inode numbers")
        if stat.S_ISDIR(st_a.st_mode) and kinds(path_a) != kinds(path_b):
            found.append(f"{name!r}: a listing has other types")
        if contents and stat.S_ISREG(st_a.st_mode) and content(path_a) != content(path_b):
            found.append(f"{name!r}: contents differ")
    return found
