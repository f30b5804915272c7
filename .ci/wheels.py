"""Build the source distribution and a wheel with the native kernels inside (`make wheels`).

The kernels are called through ctypes, so one wheel serves every Python 3.11 and later on its platform. `auditwheel`
gives it the oldest manylinux tag that its library allows: build on an old distribution to reach old machines.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = "batchline/native/_kernels.so"


def main(target: Path) -> None:
    """Write both to `target`. Exits with a message where the kernels could not be built."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder)
        # the wheel is built from the source distribution, which so proves complete
        subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", built, ROOT], check=True)
        (wheel,) = built.glob("*.whl")
        if KERNELS not in zipfile.ZipFile(wheel).namelist():
            sys.exit(f"{wheel.name} holds no {KERNELS}: is there a C++17 compiler?")
        if sys.platform == "linux":
            auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", built / "repaired", wheel]
            subprocess.run(auditwheel, check=True)
            (wheel,) = (built / "repaired").glob("*.whl")
        for path in (wheel, *built.glob("*.tar.gz")):
            print(shutil.copy(path, target))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
