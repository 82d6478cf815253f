"""Every mutated file gives its content or a VitrailError within the limits of time and memory.

`make fuzz` reads many more files. A file that once failed lies in corpus/FORMAT/TARGET~NAME and is read here.
"""

import random
from pathlib import Path

import pytest

from fuzz import mutations
from fuzz.runner import Report, format_report, fuzz_format, get_formats, read_files

CORPUS = Path(__file__).parent / "corpus"


def check(name: str, report: Report) -> None:
    assert not report.findings, "\n".join(
        [format_report(name, report), *(f"{f.target} {f.number}: {f.outcome} {f.detail}" for f in report.findings)]
    )


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
@pytest.mark.timeout(600)
def test_corpus(name, monkeypatch):
    monkeypatch.setenv("VITRAIL_FILE_SECONDS", "4")
    files = sorted(path for path in (CORPUS / name).iterdir())
    report = read_files(name, [(path.name.partition("~")[0], path.read_bytes()) for path in files])
    assert sum(report.outcomes.values()) == len(files) > 0
    check(name, report)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(get_formats()))
def test_mutated_files(name):
    report = fuzz_format(name, 300, seed=1)
    assert report.outcomes["refused"] > 10
    check(name, report)


def test_mutation_is_a_function_of_seed_and_number():
    """Whatever was mutated before: mutations once changed the values that later ones insert."""
    data, values = b'{"a": {"b": [1, 2, {"c": 3}], "d": "x"}, "e": [[], {}]}', repr(mutations.VALUES)
    numbers = list(range(3000))

    def mutate(order):
        return {n: mutations.mutate_json(data, random.Random(n)) for n in order}

    assert mutate(numbers) == mutate(numbers[::-1])
    assert repr(mutations.VALUES) == values


def test_findings_are_reported():
    """A reader that raises another error, and one that ends its process, are found."""
    report = fuzz_format("self-test", 40, seed=0)
    outcomes = {finding.outcome for finding in report.findings}
    assert {"KeyError", "crash"} <= outcomes, report.outcomes
    assert report.outcomes["read"] and all(finding.data for finding in report.findings)
