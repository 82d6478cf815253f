"""Cost of vision-language models, component by component.

The decoder's workload is that of the pass; tower and connectors have their own, or none if no image is encoded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from vitrail.encoders.layer_selection import FeatureLayer
from vitrail.encoders.multi_tower import find_unused_modules
from vitrail.encoders.vit import ViT
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.processing.batch_resize import get_fixed_view
from vitrail.stream import RowTemplate


class CostComponent(NamedTuple):
    """Modules of a model with a common workload.

    list_unused_modules    submodules that the pass does not use
    extra_parameters  parameters outside of modules
    extra_flops       operations of the pass outside of modules
    """

    modules: Sequence[nn.Module]
    workload: Workload | None
    list_unused_modules: Sequence[nn.Module] = ()
    extra_parameters: Sequence[nn.Parameter] = ()
    extra_flops: int = 0

    @property
    def parameters(self) -> int:
        own = sum(p.numel() for module in self.modules for p in module.parameters())
        return own + sum(p.numel() for p in self.extra_parameters)

    @property
    def flops(self) -> int:
        work = self.workload
        if work is None:
            return 0
        unused_flops = sum(cost.count_flops(one, work) for one in self.list_unused_modules)
        return sum(cost.count_flops(one, work) for one in self.modules) - unused_flops + self.extra_flops

    @property
    def bytes(self) -> cost.MemoryBytes:
        if self.workload is None:
            return cost.MemoryBytes(weights=count_parameter_bytes(*self.modules, *self.extra_parameters))
        loose = count_parameter_bytes(*self.extra_parameters)
        found = sum((cost.count_bytes(one, self.workload) for one in self.modules), cost.MemoryBytes(loose, loose))
        return found + cost.MemoryBytes(read=-count_parameter_bytes(*self.list_unused_modules))


class VLMWorkload(Workload):
    """Decoder workload whose `context_tokens` are image tokens, in the stream or for cross-attention.

    `vision_workloads` are those of the tower, the connectors if there are any, and fused queries; empty without images.
    """

    vision_workloads: tuple[Any, ...] = ()

    @classmethod
    def from_decoder_workload(cls, workload: Workload, *vision_workloads: Workload | None) -> "VLMWorkload":
        return cls(
            **{field: getattr(workload, field) for field in Workload.__struct_fields__},
            vision_workloads=vision_workloads,
        )


def make_row_workload(
    model: Any,
    template: RowTemplate,
    num_rows: int,
    num_logits: int | None = None,
    image_shape: tuple[int, int] | None = None,
) -> VLMWorkload:
    """Return the workload of rows of a model's template, with logits of `num_logits` tokens, by default all of text.

    `image_shape` is as for `make_row_template`.
    """
    size = image_shape or get_fixed_view(model.config.resolved_policy).canvas_size
    questions = {"num_questions": template.num_questions} if template.query_groups else {}
    workload = model.workload([size], template.num_prefix_ids + template.text_length, num_rows, **questions)
    num_logits = num_rows * template.text_length if num_logits is None else num_logits
    return workload.replace(cached_tokens=0, logit_tokens=num_logits)


def add_workloads(one: tuple[Workload, ...], other: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """Add the workloads of two passes of the same components."""
    if not one or not other:
        return one or other
    fields = ("tokens", "attention_pairs", "context_tokens", "context_pairs", "sequences")
    pairs = zip(one, other, strict=True)
    return tuple(a.replace(**{field: getattr(a, field) + getattr(b, field) for field in fields}) for a, b in pairs)


def make_cost_components(
    workload: Workload,
    tower: nn.Module,
    connectors: Sequence[nn.Module],
    decoder: nn.Module,
    *,
    vision_feature_layer: FeatureLayer = None,
    extra_parameters: Sequence[nn.Parameter] = (),
    queries: nn.Module | None = None,
    reduction_flops: int = 0,
) -> dict[str, CostComponent]:
    """Build the cost components of a model with tower features from `vision_feature_layer`.

    A workload without vision workloads runs the decoder only. `reduction_flops` are the operations that select the
    features of one view.
    """
    tower_work, connector_work, query_work = (
        *(workload.vision_workloads if isinstance(workload, VLMWorkload) else ()),
        None,
        None,
        None,
    )[:3]
    selection_flops = 0 if tower_work is None else tower_work.sequences * reduction_flops
    unused = find_unused_modules(tower, vision_feature_layer) if isinstance(tower, ViT) else []
    components = {"tower": CostComponent([tower], tower_work, unused, extra_flops=selection_flops)}
    if connectors:
        components["connector"] = CostComponent(connectors, connector_work, extra_parameters=extra_parameters)
    if queries is not None:
        components["queries"] = CostComponent([queries], query_work)
    return components | {"decoder": CostComponent([decoder], workload)}


def count_flops(model: Any, workload: Workload) -> int:
    """Count the FLOPs of all components; for models with `cost_components`."""
    return sum(component.flops for component in model.cost_components(workload).values())


def count_bytes(model: Any, workload: Workload) -> cost.MemoryBytes:
    """Count the memory traffic of all components; for models with `cost_components`."""
    return sum((component.bytes for component in model.cost_components(workload).values()), cost.MemoryBytes())
