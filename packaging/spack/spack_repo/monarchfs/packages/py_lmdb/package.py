from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyLmdb(PythonPackage):
    """LMDB for Python. Spack's own repository has older versions only."""

    homepage = "https://github.com/jnwatson/py-lmdb"
    pypi = "lmdb/lmdb-3.0.0.tar.gz"

    license("OLDAP-2.8")

    version("3.0.0", sha256="06dda0723545e14d56ac7dcd6f582d9922c2ed5e16f1c3f8d0e670a96ec2ee65")

    depends_on("c", type="build")
    depends_on("python@3.9:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    # It brings its own LMDB, and patches it.
    depends_on("py-patch-ng", type="build")
