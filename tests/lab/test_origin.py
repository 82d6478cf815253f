"""Where figures come from is told as far as it is known, and what is told is text."""

import datetime
import re

import pytest

from vitrail.lab import origin as origins
from vitrail.lab.origin import caption, commit, origin


def test_what_is_computed_now_has_a_day_a_command_and_hardware(monkeypatch):
    monkeypatch.setenv("COMMIT", "abc1234")
    found = origin("vitrail ledger --all")
    assert (found["command"], found["commit"]) == ("vitrail ledger --all", "abc1234")
    assert found["date"] == datetime.date.today().isoformat() and found["device"].endswith("CPU") and found["torch"]


@pytest.mark.parametrize("git", [True, False])
def test_a_commit_that_is_not_known_is_left_out(git, monkeypatch, tmp_path):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(origins, "ROOT", tmp_path)
    if git:
        (tmp_path / ".git").mkdir()  # of no repository
    assert commit() == "" and "commit" not in origin("vitrail")


def test_a_commit_is_that_of_the_repository(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    assert re.fullmatch(r"([0-9a-f]{7,}(-dirty)?)?", commit())


def test_a_caption_has_what_is_told_and_no_more(tmp_path):
    about = {"command": "a <b>", "device": "H200", "note": "c & d"}
    assert caption("One < two", about, tmp_path) == (
        'One &lt; two <span class="origin"><code>a &lt;b&gt;</code>, H200, '
        f"read from {tmp_path}. Note: c &amp; d.</span>"
    )
    assert caption("x", {}) == 'x <span class="origin">computed for this page.</span>'
