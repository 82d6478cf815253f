"""OpenMP settings of `import vitrail`."""

import os
import subprocess
import sys

import pytest

from vitrail.thread_settings import configure_threads, count_available_cpus


def test_settings_of_the_user_do_not_change():
    environment = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active", "KMP_BLOCKTIME": "200"}
    configure_threads(before := dict(environment))
    assert before == environment


def test_defaults():
    configure_threads(environment := {})
    assert environment == {
        "OMP_NUM_THREADS": str(count_available_cpus()), "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "limit"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_quota_limits_the_count(tmp_path, monkeypatch, text, limit):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)), raising=False)
    (file := tmp_path / "cpu.max").write_text(text)
    assert count_available_cpus(file) == (limit or 8)
    assert count_available_cpus(tmp_path / "missing") == 8


@pytest.mark.parametrize(("before", "policy"), [("pass", "passive"), ("sys.modules['torch'] = sys", "None")])
def test_import_sets_them_unless_torch_is_imported(before, policy):
    code = f"import os, sys\n{before}\nimport vitrail\nprint(os.environ.get('OMP_WAIT_POLICY'))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_"))}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == policy


def test_command_line_sets_them_before_torch_is_imported():
    code = (
        "import os, sys, vitrail.cli\nassert 'torch' not in sys.modules\nsys.argv[1:] = ['--version']\n"
        "try: vitrail.cli.main()\nexcept SystemExit: pass\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_"))}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split()[-2:] == ["passive", "False"]
