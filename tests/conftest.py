"""Shared by all tests: one torch thread a worker, a fixed seed, and a list of what was long without saying so."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing of what is tested
settings.load_profile("untimed")

LIMIT = 5.0  # seconds of an unmarked test, imports of the oracles aside


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marked = {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}
    if report.when == "call" and call.duration > LIMIT and not marked:
        report.user_properties.append(("long", call.duration))
    return report


def pytest_terminal_summary(terminalreporter):
    """Named, never failed: how long a test takes says as much of the machine as of the test."""
    passed = terminalreporter.getreports("passed")
    long = {report.nodeid: took for report in passed for name, took in report.user_properties if name == "long"}
    if long:
        terminalreporter.section(f"over {LIMIT:.0f} s: speed up or mark slow")
        for name, took in sorted(long.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{took:5.1f} s  {name}")
