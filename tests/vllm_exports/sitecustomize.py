"""Let torch for CPUs import PyPI's torchvision, in every process of vLLM's environment.

Python imports this module at its start if the folder is in PYTHONPATH. PyPI's torchvision is built for CUDA, and torch
for CPUs cannot load its operators. torchvision describes two of them on import, so they are defined before. Image
processors do not use them.
"""

import importlib.abc
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float dets_scale, int dets_zero_point, float iou_threshold) -> Tensor",
)


class _OperatorDefiner(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is imported. It finds no module itself."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)


sys.meta_path.insert(0, _OperatorDefiner())
