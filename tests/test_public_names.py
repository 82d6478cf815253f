"""Public names are importable from their package, and packages import them on first access."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail
from vitrail.config import Config
from vitrail.registry import CONNECTORS, ENCODERS, MODELS, QUANTIZERS, RESOLUTION_POLICIES

ROOT = Path(vitrail.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
NO_PUBLIC_NAMES = {"cli", "integrations", "serve"}  # commands; modules that import other frameworks; sub-packages


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_exports_its_public_names(name):
    package = importlib.import_module(f"vitrail.{name}")
    names = getattr(package, "__all__", [])
    assert bool(names) == (name not in NO_PUBLIC_NAMES)
    assert len(set(names)) == len(names) and set(names) <= set(dir(package))
    assert all(hasattr(package, each) for each in names)
    with pytest.raises(AttributeError):
        _ = package.no_such_name


@pytest.mark.parametrize(
    "registry", [MODELS, ENCODERS, CONNECTORS, QUANTIZERS, RESOLUTION_POLICIES], ids=lambda registry: registry.symbol
)
def test_components_and_their_configs_are_importable_from_their_package(registry):
    """A new component needs one new file only, so the newest may be missing from the public names."""
    public = 0
    for name in registry.own_names:
        component = registry[name]
        config = component if issubclass(component, Config) else component.Config
        for each in {component, config}:
            parts = each.__module__.split(".")
            package = importlib.import_module(".".join(parts[:3] if "quantizers" in parts else parts[:2]))
            if each.__name__ in package.__all__:
                assert getattr(package, each.__name__) is each
                public += 1
    assert public >= 0.75 * len(registry.own_names)


def test_sub_packages_are_attributes_of_vitrail():
    assert set(vitrail._SUBMODULES) == {name for name in PACKAGES if name != "cli"}
    assert vitrail.__getattr__("models") is importlib.import_module("vitrail.models")


def test_lazy_packages_import_no_module_before_a_name_is_used():
    lazy = sorted(path.parent.name for path in ROOT.glob("*/__init__.pyi"))
    code = f"import sys, importlib; [importlib.import_module('vitrail.' + name) for name in {lazy}]; "
    code += "print('torch' in sys.modules); from vitrail.models import VLM; print(VLM.__name__, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(lazy) > 8 and run.stdout.split() == ["False", "VLM", "True"]


def test_the_command_line_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "vitrail", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == vitrail.__version__
