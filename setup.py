"""Build of the C part. Everything else is declared in pyproject.toml."""

import subprocess

from setuptools import Extension, setup


def pkg_config(option: str) -> list[str]:
    """Words that pkg-config(1) prints for libfuse 3; none where it is missing.

    The extension is optional: without it the mount works, but a process waiting for a hung source
    cannot be killed and a cold listing asks the source about every name.
    """
    try:
        out = subprocess.run(
            ["pkg-config", option, "fuse3"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return out.stdout.split()


PARTS = (
    "_session", "_relay", "_bytes", "_resident", "_unfinished", "_pool", "_backed", "_table",
    "_known", "_parking", "_journal",
)  # fmt: skip

setup(
    ext_modules=[
        Extension(
            "monarchfs.fuse._session",
            [f"monarchfs/fuse/{part}.c" for part in PARTS],
            depends=[f"monarchfs/fuse/{part}.h" for part in PARTS[1:]],
            extra_compile_args=[
                *(pkg_config("--cflags") or ["-I/usr/include/fuse3"]),
                "-std=gnu11",
                "-O2",
                "-Wall",
                "-Wextra",
                "-D_FILE_OFFSET_BITS=64",
                "-pthread",
            ],
            extra_link_args=pkg_config("--libs") or ["-lfuse3"],
            optional=True,
        )
    ]
)
