"""The origin of results."""

import datetime
import re

import pytest

from vitrail.lab import origin as origins
from vitrail.lab.origin import collect_origin, read_commit


def test_origin_has_date_command_and_hardware(monkeypatch):
    monkeypatch.setenv("COMMIT", "abc1234")
    found = collect_origin("vitrail ledger --all")
    assert (found["command"], found["commit"]) == ("vitrail ledger --all", "abc1234")
    assert found["date"] == datetime.date.today().isoformat() and found["device"].endswith("CPU") and found["torch"]


@pytest.mark.parametrize("git", [True, False])
def test_unknown_commit_is_omitted(git, monkeypatch, tmp_path):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(origins, "REPOSITORY", tmp_path)
    if git:
        (tmp_path / ".git").mkdir()  # not a repository
    assert read_commit() == "" and "commit" not in collect_origin("vitrail")


def test_commit_is_a_hash(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    assert re.fullmatch(r"([0-9a-f]{7,}(-dirty)?)?", read_commit())
