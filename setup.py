"""Builds the native kernels where a C++ compiler is found; without one the installation succeeds all the same.

Everything else about the package is in pyproject.toml. One shared library holds the kernels of every instruction set;
which of them run is decided when it is loaded, so no flag here depends on the machine that builds. Python calls the
library through ctypes, so one wheel serves every version of Python.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/batchline/native")


class BuildKernels(build_ext):
    """Names the library without a version of Python, since it uses none."""

    def get_ext_filename(self, fullname: str) -> str:
        """The path of an extension module below the build folder."""
        return super().get_ext_filename(fullname).split(".", 1)[0] + ".so"


class AnyPythonWheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """(Python, ABI, platform)."""
        return ("py3", "none", super().get_tag()[2])


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
    ext_modules=[
        Extension(
            "batchline.native._kernels",
            sources=[str(path) for path in sorted(NATIVE.glob("*.cpp"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=fast",
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-Wno-psabi",
            ],
            language="c++",
            optional=True,
        )
    ],
)
