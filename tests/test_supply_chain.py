"""Dependencies are pinned by checksum, and a release lists what it needs."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.data.episodes import WORLDS
from vitrail.data.episodes.simulators import find_requirements_file

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "packages"))

from lock_requirements import get_version, normalize  # noqa: E402
from write_sbom import build_sbom  # noqa: E402


def read_lock(file: Path) -> dict[str, list[str]]:
    """Return requirement → checksums, of the lines that pip joins."""
    lines = file.read_text().replace("\\\n", " ").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: hashes for name, *hashes in rows}


def test_every_constraint_has_checksums():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    locked = read_lock(ROOT / "constraints.lock") | read_lock(ROOT / "torch.lock")
    assert sorted(locked) == sorted(pins)
    for name, hashes in locked.items():
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", value) for value in hashes), name


def test_make_installs_only_what_has_checksums():
    makefile = (ROOT / "Makefile").read_text()
    assert "pip install --quiet --require-hashes --no-deps --requirement constraints.lock" in makefile
    assert "pip install --quiet --require-hashes --no-deps --requirement torch.lock" in makefile
    assert "--no-build-isolation" in makefile  # else the build would fetch hatchling again


def test_wrong_checksum_is_refused(tmp_path):
    """By pip, for a file on this disk."""
    wheel = tmp_path / "made-1.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    (tmp_path / "lock").write_text(f"made==1.0 --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path)]
    command += ["--require-hashes", "--no-deps", "--target", str(tmp_path / "out"), "-r", str(tmp_path / "lock")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if world.packages])
def test_simulators_are_pinned_by_checksum(name):
    world = WORLDS[name]
    locked = read_lock(find_requirements_file(world))
    names = {normalize(row.partition("==")[0]): row.partition("==")[2] for row in locked}
    for package in world.packages:
        project, _, version = package.partition("==")
        assert names[normalize(project.partition("[")[0])] == version
    assert all(locked.values())


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "2.13.0"),
        ("torch-2.13.0.tar.gz", "2.13.0"),
        ("torch_more-2.13.0-py3-none-any.whl", None),
        ("torch-more-2.13.0.tar.gz", None),
        ("torch-2.13.0.exe", None),
    ],
)
def test_versions_of_files(file, version):
    assert get_version(file, "torch") == version


def test_bill_of_materials(tmp_path):
    (tmp_path / "vitrail-0.1.0-py3-none-any.whl").write_bytes(b"wheel")
    sbom = build_sbom("vitrail", [tmp_path / "vitrail-0.1.0-py3-none-any.whl"])
    assert sbom == build_sbom("vitrail", [tmp_path / "vitrail-0.1.0-py3-none-any.whl"])
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", sbom["serialNumber"])
    file, *libraries = sbom["components"]
    assert file["hashes"] == [
        {"alg": "SHA-256", "content": "ba59926159d2aa256eb8739b8da7e2b574b960e1202c6d624cbe981cef996c91"}
    ]
    names = {normalize(component["name"]): component for component in libraries}
    assert {"torch", "numpy", "safetensors", "msgspec", "transformers", "av", "gymnasium"} <= names.keys()
    assert not {"pytest", "ruff", "sphinx", "diffusers"} & names.keys()  # of dev and docs
    for name, component in names.items():
        assert component["purl"] == f"pkg:pypi/{name}@{importlib.metadata.version(name)}"
    references = {component["bom-ref"] for component in libraries} | {sbom["metadata"]["component"]["bom-ref"]}
    assert {row["ref"] for row in sbom["dependencies"]} == references
    assert {child for row in sbom["dependencies"] for child in row["dependsOn"]} <= references
    json.dumps(sbom)
