"""The files in deploy/ and the source distribution, checked as far as that goes without their runtimes."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from batchline.cli.main import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line, parsed by the command but not run. Raises for an option that does not exist."""
    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    root = group.make_context("batchline", [], resilient_parsing=True)
    command = group.commands[name]
    context: Any = command.context_class(command, info_name=name, parent=root)
    command.parse_args(context, rest)
    return dict(context.params)


def container() -> dict[str, Any]:
    job = list(yaml.safe_load_all((DEPLOY / "job.yaml").read_text()))[1]
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_the_kubernetes_job_is_valid() -> None:
    resources = list(yaml.safe_load_all((DEPLOY / "job.yaml").read_text()))
    assert [resource["kind"] for resource in resources] == ["PersistentVolumeClaim", "Job"]
    for resource in resources:
        kubernetes_validate.validate(resource, "1.31", strict=True)


def test_the_kubernetes_job_runs_a_command_that_exists() -> None:
    options = parse(container()["args"])
    assert options["input_file"] == "/data/in.jsonl"
    assert options["output_file"] == "/data/out.jsonl"


def test_kubernetes_waits_longer_than_the_run_for_its_requests() -> None:
    job = list(yaml.safe_load_all((DEPLOY / "job.yaml").read_text()))[1]
    grace_period_s = parse(container()["args"])["grace_period"]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > grace_period_s


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "batchline.service")
    return unit["Service"]


def test_the_systemd_unit_runs_a_command_that_exists(tmp_path: Path) -> None:
    executable, *arguments = service()["ExecStart"].split()
    assert Path(executable).name == "batchline"
    config = tmp_path / "server.yaml"
    config.write_text("model: my-model\n")
    options = parse([str(config) if argument.endswith(".yaml") else argument for argument in arguments])
    assert float(service()["TimeoutStopSec"]) > options["grace_period"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_no_fault_with_the_unit() -> None:
    command = ["systemd-analyze", "verify", str(DEPLOY / "batchline.service")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    faults = [line for line in result.stderr.splitlines() if "batchline is not executable" not in line]
    assert faults == []


def test_the_image_is_built_from_files_that_exist_and_are_sent_to_the_builder() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.M) for name in line.split()[:-1]]
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def extras() -> list[str]:
    part = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return [name for name in re.findall(r"^(\w+) = \[", part, re.M) if name != "dev"]


def test_every_extra_that_a_text_names_exists() -> None:
    """`pip install 'batchline[ray]'` installed no Ray: there was no such extra."""
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {name for path in texts for name in re.findall(r"(?:batchline|`\.)\[(\w+)\]", path.read_text())}
    assert named <= set(extras())
    (listed,) = re.findall(r"EXTRAS .*comma-separated: (.*)", (DEPLOY / "Dockerfile").read_text())
    assert listed.split(", ") == extras()


def test_the_systemd_unit_stores_batches_where_it_may_write() -> None:
    """A dynamic user's home is `/`, which is read-only: the server could not start without a `state-dir`."""
    assert service()["StateDirectory"] == "batchline"
    assert "BATCHLINE_STATE_DIR=%S/batchline" in service()["Environment"].split()


def test_the_source_distribution_holds_every_tracked_file(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path / "copy"
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=copy, capture_output=True, check=True)
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as members:
        packed = {name.partition("/")[2] for name in members.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert tracked - packed == {".gitignore"}
