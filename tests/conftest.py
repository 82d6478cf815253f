"""Settings of all tests: one torch thread, a fixed seed, and a list of slow tests without the marker `slow`."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch

torch.set_num_threads(1)
try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a bare GPU machine has no dev extra
    pass
else:
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

LIMIT = 5.0  # seconds of an unmarked test, without imports of the references


def pytest_configure(config):
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: ignored, because pytest-timeout is not installed")


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "ignored, because pytest-timeout is not installed")


def pytest_ignore_collect(collection_path, config):
    """Import only the modules with GPU tests for `-m gpu`: the other modules need the dev extra."""
    if config.getoption("markexpr") == "gpu" and collection_path.suffix == ".py":
        return "mark.gpu" not in collection_path.read_text() or None
    return None


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
    """List slow tests. They do not fail, because their time depends on the machine."""
    passed = terminalreporter.getreports("passed")
    long = {report.nodeid: seconds for report in passed for name, seconds in report.user_properties if name == "long"}
    if long:
        terminalreporter.section(f"over {LIMIT:.0f} s: speed up or mark slow")
        for name, seconds in sorted(long.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{seconds:5.1f} s  {name}")
