from spack.package import default_args, depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyTrio(PythonPackage):
    """Concurrent input and output for Python's coroutines."""

    homepage = "https://github.com/python-trio/trio"
    pypi = "trio/trio-0.35.0.tar.gz"

    license("MIT OR Apache-2.0")

    version("0.35.0", sha256="7efb295c78a0ecd1235c5759e620b5da564ca80d2efcb0055423588547248b96")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    with default_args(type=("build", "run")):
        depends_on("py-attrs@23.2:")
        depends_on("py-exceptiongroup", when="^python@:3.10")
        depends_on("py-idna")
        depends_on("py-outcome")
        depends_on("py-sniffio@1.3:")
        depends_on("py-sortedcontainers")
