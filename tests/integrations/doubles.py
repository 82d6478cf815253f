"""Test doubles of lmms-eval 0.7.3 and VLMEvalKit 0.2rc1."""

import abc
import sys
import types
from dataclasses import dataclass, field
from importlib.util import find_spec

# lmms_eval.api.model, .api.instance, .api.registry, .models.registry_v2


class CacheHook:
    def __init__(self, cachinglm=None):
        pass

    def add_partial(self, attr, req, res):
        pass


class lmms(abc.ABC):
    is_simple = True

    def __init__(self):
        self._rank, self._world_size, self.cache_hook, self.task_dict = 0, 1, CacheHook(None), {}

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @abc.abstractmethod
    def generate_until_multi_round(self, requests): ...


@dataclass
class Instance:
    request_type: str
    arguments: tuple
    idx: int
    metadata: dict = field(default_factory=dict)

    @property
    def args(self):
        return self.arguments if isinstance(self.arguments, tuple) else (self.arguments,)


MODEL_REGISTRY = {}


def register_model(*names):
    def decorate(cls):
        for name in names:
            assert issubclass(cls, sys.modules["lmms_eval.api.model"].lmms)
            MODEL_REGISTRY[name] = cls
        return cls

    return decorate


@dataclass(frozen=True)
class ModelManifest:
    model_id: str
    simple_class_path: str | None = None
    chat_class_path: str | None = None
    aliases: tuple[str, ...] = ()


# vlmeval.vlm.base


class BaseModel:
    INTERLEAVE = False
    allowed_types = ["text", "image", "video"]

    def __init__(self):
        self.dump_image_func = None

    def use_custom_prompt(self, dataset):
        return False

    def generate(self, message, dataset=None):
        """Generate from a string or a list of dictionaries."""
        message = [{"type": "text", "value": message}] if isinstance(message, str) else message
        for item in message:
            assert item["type"] in self.allowed_types
        return self.generate_inner(message, dataset)


MODULES = {
    "lmms_eval": {},
    "lmms_eval.api": {},
    "lmms_eval.api.model": {"lmms": lmms, "CacheHook": CacheHook},
    "lmms_eval.api.instance": {"Instance": Instance},
    "lmms_eval.api.registry": {"register_model": register_model, "MODEL_REGISTRY": MODEL_REGISTRY},
    "lmms_eval.models": {},
    "lmms_eval.models.registry_v2": {"ModelManifest": ModelManifest},
    "vlmeval": {},
    "vlmeval.vlm": {},
    "vlmeval.vlm.base": {"BaseModel": BaseModel},
    "vlmeval.config": {"supported_VLM": {}},
}


def install(package: str, monkeypatch) -> None:
    """Install the double of a package unless the package is installed."""
    if package in sys.modules or find_spec(package) is not None:
        return
    for name, holds in MODULES.items():
        if name.split(".")[0] == package:
            module = types.ModuleType(name)
            vars(module).update(holds)
            monkeypatch.setitem(sys.modules, name, module)
