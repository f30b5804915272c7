"""Builds the native kernels where a C++ compiler is found; without one the installation succeeds all the same.

Everything else about the package is in pyproject.toml. One shared library holds the kernels of every instruction set;
which of them run is decided when it is loaded, so no flag here depends on the machine that builds.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/batchline/native")

setup(
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
    ]
)
