from spack.package import default_args, depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class Monarchfs(PythonPackage):
    """A FUSE mount that serves a dataset on a parallel file system from node-local storage."""

    # Nothing is published: a site puts an archive there, or names another place (docs/INSTALL.md).
    url = "file:///usr/src/monarchfs-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    # The bounds are those of pyproject.toml: tests/packages/test_packages.py compares them.
    depends_on("c", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-pyfuse3@3.4:3.5")
        depends_on("py-trio@0.25:")
        depends_on("py-outcome@1.3:")
        depends_on("py-lmdb@3.0:")
        depends_on("py-psutil@5.9:")
        depends_on("py-xxhash@3:")
        depends_on("py-prometheus-client@0.16:")
        depends_on("py-rich@13:")
        depends_on("py-shtab@1.13:")
        depends_on("py-tomli@2:", when="^python@:3.10")
    depends_on("libfuse@3.12:")
    depends_on("xxhash", type="build")
    depends_on("curl", type=("build", "link", "run"))
