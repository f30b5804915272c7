"""llama.cpp's programs, and workload models as GGUF files for them.

The programs come from a folder that `make .peers/llama.cpp/.built` fills (see README.md here). Only token ids go in and
out, so the files hold a made-up vocabulary of the right size instead of the workload's tokenizer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measured_process import PeerError

PROGRAMS = ("llama-batched-bench", "llama-quantize", "llama-server")

QUANTIZATIONS = {"BF16": None, "Q8_0": "int8", "Q4_0": "int4"}
"""Kinds of GGUF files that are compared, and the `--quantization` of Batchline with weights of about the same size."""

GGUF_WRITER = Path(__file__).parents[2] / "tests" / "checkpoints"
"""The folder of gguf_models.py, which writes the files for the tests, too."""


def check_programs(folder: Path) -> None:
    """Raises: PeerError if a program is missing."""
    missing = [name for name in PROGRAMS if not (folder / name).is_file()]
    if missing:
        names = ", ".join(missing)
        raise PeerError(f"{folder} lacks {names}; benchmarks/peers/README.md says how to set up llama.cpp")


def version(folder: Path) -> str:
    """The version that the server reports, with the name of the source distribution that it was built from."""
    reported = run_program([str(folder / "llama-server"), "--version"])
    return next((line.removeprefix("version: ") for line in reported.splitlines() if line.startswith("version: ")), "")


def gguf_file(folder: Path, model: Path, kind: str) -> Path:
    """The model's weights as a GGUF file beside it, written once. kind: a key of QUANTIZATIONS."""
    path = model.parent / "gguf" / f"{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        if kind == "BF16":
            _convert(model, unfinished)
        else:
            source = gguf_file(folder, model, "BF16")
            run_program([str(folder / "llama-quantize"), str(source), str(unfinished), kind])
        unfinished.rename(path)
    return path


def run_program(command: Sequence[str]) -> str:
    """What it prints. Raises: PeerError if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        last_lines = "\n".join(done.stdout.splitlines()[-30:])
        raise PeerError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{last_lines}")
    return done.stdout


def _convert(model: Path, path: Path) -> None:
    """Write all matrices in bfloat16. llama.cpp's own converter refuses the workload's tokenizer of whole words."""
    sys.path.insert(0, str(GGUF_WRITER))
    from gguf_models import write_gguf  # heavy: it loads the model with transformers

    with tempfile.TemporaryDirectory() as folder:
        for file in (model / "config.json", *model.glob("*.safetensors*")):
            (Path(folder) / file.name).symlink_to(file.absolute())
        write_gguf(Path(folder), path, {"": "BF16"})  # without a tokenizer.json, the vocabulary is made up
