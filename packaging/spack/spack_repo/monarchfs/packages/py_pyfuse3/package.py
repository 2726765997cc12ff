from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyPyfuse3(PythonPackage):
    """libfuse 3 for Python's coroutines."""

    homepage = "https://github.com/libfuse/pyfuse3"
    pypi = "pyfuse3/pyfuse3-3.5.0.tar.gz"

    license("LGPL-2.1-or-later")

    version("3.5.0", sha256="88399a9494b88603230bba300f4ba9ad63fece5ed514ca3633d555a0c6a42b24")

    depends_on("c", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@78.1.1:", type="build")
    depends_on("py-setuptools-scm@8:", type="build")
    depends_on("py-cython", type="build")
    depends_on("py-trio@0.15:", type=("build", "run"))
    depends_on("libfuse@3.3:")
