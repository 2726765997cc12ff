from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyOutcome(PythonPackage):
    """What a call returned or raised, as a value."""

    homepage = "https://github.com/python-trio/outcome"
    pypi = "outcome/outcome-1.3.0.post0.tar.gz"

    license("MIT OR Apache-2.0")

    version(
        "1.3.0.post0", sha256="9dcf02e65f2971b80047b377468e72a268e15c0af3cf1238e6ff14f7f91143b8"
    )

    depends_on("python@3.7:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-attrs@19.2:", type=("build", "run"))
