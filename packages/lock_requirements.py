"""Write a lock file: pinned requirements with the checksums of all their files, for `pip install --require-hashes`.

    python packages/lock_requirements.py constraints.txt constraints.lock

Every name==version of the input gets the checksums of the wheels of that version in pip's package index, for all
platforms and the tested versions of Python, or else of its source archive. `--wheels` adds the files of a folder, such
as the CPU build of torch, which has another index.
"""

import argparse
import hashlib
import html
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

PYTHONS = re.compile(r"-(?:py2\.)?py3-|-cp31[1-3]-cp31[1-3]-|-cp3\d+-abi3-|-py3\w*-none-")


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def get_index() -> str:
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


def list_files(index: str, name: str) -> dict[str, str]:
    """Return the files of a package in the index: file name → SHA-256."""
    with urllib.request.urlopen(f"{index.rstrip('/')}/{normalize(name)}/", timeout=60) as reply:
        page = reply.read().decode()
    links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', page)
    return {unquote(html.unescape(url)).rpartition("/")[2]: digest for url, digest in links}


def get_version(file: str, name: str) -> str | None:
    """Return the version in the name of a wheel or of a source archive, without its local part."""
    stem = re.sub(r"\.(tar\.gz|zip|tar\.bz2)$", "", file)
    if file.endswith(".whl"):
        project, version = stem.split("-")[:2]
    elif stem != file:
        project, _, version = stem.rpartition("-")
    else:
        return None
    return version.partition("+")[0] if normalize(project) == normalize(name) else None


def lock(requirement: str, index: str, wheels: list[Path]) -> str:
    """Return the lines of one pinned requirement."""
    name, version = requirement.split("==")
    files = {file: digest for file, digest in list_files(index, name).items() if get_version(file, name) == version}
    usable = {file: digest for file, digest in files.items() if PYTHONS.search(file)}
    digests = set((usable or files).values())
    digests |= {hashlib.sha256(w.read_bytes()).hexdigest() for w in wheels if get_version(w.name, name) == version}
    if not digests:
        raise SystemExit(f"{requirement} has no files in {index}")
    return " \\\n".join([requirement, *(f"    --hash=sha256:{digest}" for digest in sorted(digests))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--index", help="default: that of pip")
    parser.add_argument("--separate", metavar="NAME", help="write this requirement to NAME.lock, beside the other file")
    parser.add_argument("--wheels", type=Path, help="folder of further files")
    options = parser.parse_args()
    lines = [line.partition("#")[0].strip() for line in options.requirements.read_text().splitlines()]
    wheels = [] if options.wheels is None else sorted(options.wheels.glob("*.whl"))
    with ThreadPoolExecutor(8) as pool:
        index = options.index or get_index()
        locked = list(pool.map(lambda line: lock(line, index, wheels), filter(None, lines)))
    alone = [text for text in locked if text.startswith(f"{options.separate}==")]
    head = f"# From {options.requirements.name}, by `make lock`: pip install --require-hashes --no-deps -r THIS"
    options.out.write_text("\n".join([head, *(text for text in locked if text not in alone)]) + "\n")
    if alone:
        options.out.with_name(f"{options.separate}.lock").write_text("\n".join([head, *alone]) + "\n")


if __name__ == "__main__":
    main()
