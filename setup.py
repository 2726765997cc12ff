"""Build of the C part. Everything else is declared in pyproject.toml."""

import os
import subprocess
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.errors import CompileError, ExecError, LinkError

NEEDS = (
    "monarchfs needs a C compiler and the headers of libfuse 3, xxHash, libcurl and Python:"
    " apt-get install gcc libc6-dev libfuse3-dev libxxhash-dev libcurl4-openssl-dev pkg-config"
    " python3-dev"
)


def pkg_config(option: str) -> list[str]:
    """Words that pkg-config(1) prints for libfuse 3; none where it is missing."""
    try:
        out = subprocess.run(
            ["pkg-config", option, "fuse3"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return out.stdout.split()


INCLUDED = ("Python.h", "fuse_lowlevel.h", "xxhash.h", "curl/curl.h")


def can_build() -> bool:
    """Whether there are a compiler, pkg-config with libfuse 3, and all headers."""
    source = "".join(f"#include <{header}>\n" for header in INCLUDED)
    words = [*(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()]
    words += [*pkg_config("--cflags"), "-DFUSE_USE_VERSION=312", "-D_FILE_OFFSET_BITS=64"]
    words += ["-I", sysconfig.get_path("include"), "-fsyntax-only", "-x", "c", "-"]
    try:
        done = subprocess.run(words, input=source, text=True, capture_output=True, check=False)
    except OSError:
        return False
    return bool(pkg_config("--libs")) and done.returncode == 0


class DescribeOrSayWhy(dist_info):
    """pip asks for this before it comes to pyfuse3, which would end with a traceback where the same
    headers are missing."""

    def run(self) -> None:
        if not can_build():
            raise SystemExit(NEEDS)
        super().run()


class BuildOrSayWhy(build_ext):
    """The compiler's own words come before; the last line names what is missing."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, ExecError, LinkError):
            raise SystemExit(NEEDS) from None


UNITS = ["monarchfs/core/_units.c", "monarchfs/core/_unit.c"]
PEERS = ("_bindings", "_fetch", "_places", "_want")

# Also what a source distribution takes along, so each has all of them.
HEADERS = sorted(glob("monarchfs/**/*.h", recursive=True))
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-D_FILE_OFFSET_BITS=64"]

setup(
    cmdclass={"build_ext": BuildOrSayWhy, "dist_info": DescribeOrSayWhy},
    ext_modules=[
        Extension(
            "monarchfs.core._session",
            sorted({*glob("monarchfs/core/_*.c")} - {*UNITS}),
            depends=HEADERS,
            extra_compile_args=[
                *(pkg_config("--cflags") or ["-I/usr/include/fuse3"]),
                *FLAGS,
                "-pthread",
            ],
            extra_link_args=pkg_config("--libs") or ["-lfuse3"],
        ),
        Extension(
            "monarchfs.cache.store._records",
            ["monarchfs/cache/store/_records.c"],
            depends=HEADERS,
            extra_compile_args=FLAGS,
        ),
        Extension(
            "monarchfs.source._stats",
            ["monarchfs/source/_stats.c", "monarchfs/source/_opened.c"],
            depends=HEADERS,
            extra_compile_args=[*FLAGS, "-pthread"],
        ),
        Extension(
            "monarchfs.peers._owners",
            ["monarchfs/peers/_owners.c"],
            depends=HEADERS,
            extra_compile_args=FLAGS,
            extra_link_args=["-lm"],
        ),
        Extension(
            "monarchfs.peers._replicas",
            [f"monarchfs/peers/{part}.c" for part in PEERS],
            depends=HEADERS,
            extra_compile_args=[*FLAGS, "-pthread"],
            extra_link_args=["-ldl"],  # libcurl
        ),
        Extension(
            "monarchfs.core._units",
            UNITS,
            depends=HEADERS,
            extra_compile_args=[*FLAGS, "-pthread"],
        ),
    ],
)
