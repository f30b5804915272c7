"""The layer rules of docs/architecture.md, held over every import in the package."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "batchline"
LAYERS = [
    {"errors", "model_facts", "printable", "process_memory"},
    {"config", "disk", "callers"},
    {"user_state", "model_thread"},
    {"native", "checkpoints", "plugins"},
    {"openai_api", "text", "media", "engine", "pooling", "speech"},
    {"endpoints"},
    {"backends"},
    {"batch"},
    {"jobs", "client", "tables"},
    {"server"},
    {"cli"},
]
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
ENTRY_POINTS = {"__init__", "__main__", "run_batch", "testing"}
ALLOWED_OWNERS = {
    "torch": {"engine", "pooling", "speech", "native", "checkpoints"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "uvloop": {"batch"},
    "prometheus_client": {"server"},
    "ray": {"backends"},
    "sqlalchemy": {"jobs"},
    "pyarrow": {"tables"},
    "llguidance": {"text"},
    "typer": {"cli"},
    "rich": {"cli", "batch"},
}


def part_of(path: Path) -> str:
    """The layer member a file belongs to: its top folder, or its own name."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "batchline":
                names = {alias.name for alias in node.names}
                found.update(f"batchline.{name}" for name in names & {*LAYER_OF, *ENTRY_POINTS})
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_the_layers_only(path: Path) -> None:
    part = part_of(path)
    if part in ENTRY_POINTS:
        return
    for name in imports_of(path):
        if not name.startswith("batchline."):
            continue
        target = name.split(".")[1]
        if target == part or target in ENTRY_POINTS:
            assert target != "testing", f"{path} imports the test fakes"
            continue
        assert LAYER_OF[target] < LAYER_OF[part], f"{path} ({part}) must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_the_layer_that_owns_them(path: Path) -> None:
    part = part_of(path)
    for name in imports_of(path):
        owners = ALLOWED_OWNERS.get(name.split(".")[0])
        assert owners is None or part in owners, f"{path} imports {name}"


@pytest.mark.parametrize(
    "statement",
    [
        "import batchline",
        "import batchline.batch",
        "import batchline.cli.main",
        "import batchline.server.run",
        "import batchline.backends.in_process",
    ],
)
def test_importing_the_package_loads_neither_torch_nor_transformers(statement: str) -> None:
    code = f"{statement}; import sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_starts_without_libraries_that_take_long_to_import() -> None:
    """Bug: one import of a helper brought in all of pydantic's schemas, and `batchline --help` took twice as long."""
    slow = ("pydantic", "numpy", "fsspec", "rich", "httpx", "starlette", "uvicorn", "jinja2", "importlib.metadata")
    code = f"import batchline.cli.main, sys; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["batchline.batch.api", "batchline.batch.inspect", "batchline.endpoints.chat"])
def test_runs_with_local_files_and_text_import_no_http_client(module: str) -> None:
    """Bug: every run and check imported an HTTP client, which takes a quarter of a second."""
    code = f"import {module}, sys; print([name for name in ('aiohttp', 'fsspec', 'httpx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scheduling_imports_no_torch() -> None:
    code = "import batchline.engine.scheduler, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
