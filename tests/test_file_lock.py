"""File locks, and the package without `fcntl`."""

import subprocess
import sys

import pytest

from vitrail.file_lock import lock_file

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["fcntl"] = None  # importing it raises ImportError
import vitrail
from vitrail.file_lock import fcntl, lock_file
assert fcntl is None
lock_file(open(sys.argv[1], "w"), wait=False)
modules = "codecs.token_file_writer data.sources.fetch cli training.trainer recipe hub pipelines"
for module in modules.split():
    importlib.import_module(f"vitrail.{module}")
"""


def test_second_lock_fails_without_waiting(tmp_path):
    with (tmp_path / "file").open("w") as first, (tmp_path / "file").open("w") as second:
        lock_file(first, wait=False)
        with pytest.raises(BlockingIOError):
            lock_file(second, wait=False)


def test_package_imports_without_fcntl(tmp_path):
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, str(tmp_path / "file")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
