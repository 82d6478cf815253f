"""Write the software bill of materials of a release, as CycloneDX JSON, from installed metadata. No network is used.

    python packages/write_sbom.py dist          # dist/vitrail-0.1.0.cdx.json

It lists the wheels in the folder with their checksums, and every distribution that `vitrail` needs, with the extras
that users install and not `dev`: version, licence, package URL, and which other distributions need it.
"""

import argparse
import hashlib
import importlib.metadata
import json
import re
import uuid
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

NOT_FOR_USERS = ("dev", "docs")


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def list_dependencies(name: str, extras: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the installed distributions that a distribution with these extras needs here, with their extras."""
    found = []
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        is_needed = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if is_needed and is_installed(requirement.name):
            found.append((normalize(requirement.name), tuple(sorted(requirement.extras))))
    return found


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def collect(root: str, extras: tuple[str, ...]) -> dict[str, list[str]]:
    """Return every distribution that a release needs: name → the names that it needs."""
    needs: dict[str, set[str]] = {}
    waiting, seen = [(normalize(root), extras)], set()
    while waiting:
        name, with_extras = waiting.pop()
        if (name, with_extras) in seen:
            continue
        seen.add((name, with_extras))
        found = list_dependencies(name, with_extras)
        needs.setdefault(name, set()).update(child for child, _ in found if child != name)
        waiting += found
    return {name: sorted(children) for name, children in sorted(needs.items())}


def describe(name: str) -> dict[str, Any]:
    """Return the component of an installed distribution."""
    metadata = importlib.metadata.metadata(name)
    version = importlib.metadata.version(name)
    component = {
        "type": "library",
        "bom-ref": get_reference(name),
        "name": metadata["Name"],
        "version": version,
        "purl": get_reference(name),
    }
    licence = metadata.get("License-Expression")
    texts = [row.rpartition(" :: ")[2] for row in metadata.get_all("Classifier", []) if row.startswith("License ::")]
    texts = texts or [line for line in (metadata.get("License") or "").splitlines()[:1] if 0 < len(line) < 80]
    if licence:
        component["licenses"] = [{"expression": licence}]
    elif texts:
        component["licenses"] = [{"license": {"name": text}} for text in texts]
    return component


def get_reference(name: str) -> str:
    return f"pkg:pypi/{normalize(name)}@{importlib.metadata.version(name)}"


def build_sbom(name: str, files: list[Path]) -> dict[str, Any]:
    """Return the bill of materials of an installed distribution and of the files of its release."""
    extras = importlib.metadata.metadata(name).get_all("Provides-Extra") or []
    needs = collect(name, tuple(extra for extra in extras if extra not in NOT_FOR_USERS))
    wheels = [
        {
            "type": "file",
            "bom-ref": f"file:{file.name}",
            "name": file.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
        }
        for file in files
    ]
    sbom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": describe(name) | {"type": "application"}},
        "components": [*wheels, *(describe(other) for other in needs if other != normalize(name))],
        "dependencies": [
            {"ref": get_reference(other), "dependsOn": [get_reference(child) for child in children]}
            for other, children in needs.items()
        ],
    }
    digest = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(sbom, sort_keys=True))  # the same release, the same number
    return sbom | {"serialNumber": f"urn:uuid:{digest}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the wheels")
    folder = parser.parse_args().folder
    wheels = sorted(folder.glob("*.whl"))
    sbom = build_sbom("vitrail", wheels)
    out = folder / f"vitrail-{sbom['metadata']['component']['version']}.cdx.json"
    out.write_text(json.dumps(sbom, indent=1) + "\n")
    print(f"{out}: {len(wheels)} files, {len(sbom['components']) - len(wheels)} distributions")


if __name__ == "__main__":
    main()
