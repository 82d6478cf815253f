"""Shared by all tests: one torch thread a worker, a fixed seed, and no test that is long without saying so."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch

torch.set_num_threads(1)

LIMIT = 5.0  # seconds of an unmarked test, imports of the oracles aside


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marked = {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}
    if report.when == "call" and report.passed and call.duration > LIMIT and not marked:
        # Twice the limit fails; below that a busy machine may be at fault, so it is only shown.
        report.sections.append(("slow", f"{call.duration:.1f} s"))
        if call.duration > 2 * LIMIT:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} took {call.duration:.1f} s: speed it up or mark it slow"
    return report
