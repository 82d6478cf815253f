"""Build a model in shards: no process holds more than its shards and the module that is being initialized.

Every rank builds every module with the random numbers of a single process. As soon as a module is part of another one,
its parameters become the shards of this rank, by `torch.chunk` as in FSDP2, and the other values are freed. A later
operation on a sharded parameter, such as `nn.init.normal_(self.embed.weight)` in the constructor of its owner, gathers
that one tensor and keeps the shard of the result. The weights are therefore those of a single process, bit for bit.

Buffers and scalars stay whole on every rank.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from vitrail.nn.parameters import place_loaded_parameters
from vitrail.training import distributed
from vitrail.training.tensor_shards import full_box, get_local_shard, relative_slices, replace_parameters

# Functions that keep a shard a shard. All others read whole tensors.
SHARD_FUNCTIONS = {"__get__", "__set__", "__deepcopy__", "__hash__", "__len__", "__repr__", "detach", "clone", "to"}
SHARD_FUNCTIONS |= {"float", "double", "half", "bfloat16", "requires_grad_", "is_floating_point", "is_complex", "type"}
SHARD_FUNCTIONS |= {"size", "dim", "numel", "element_size", "stride", "is_contiguous", "to_local", "full_tensor"}
IN_PLACE_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


@contextmanager
def init_in_shards() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Build models in shards inside this context; with one rank, do nothing. All ranks must build the same models.

    Yields a function that completes a model: it shards the parameters that the model itself holds.
    """
    if distributed.get_world_size() == 1:
        yield lambda model: model
        return
    mode = _ShardedInit()
    hooks = (
        register_module_module_registration_hook(mode.shard_child),
        register_module_buffer_registration_hook(mode.gather_buffer),  # pyrefly: ignore
    )
    try:
        with mode, place_loaded_parameters(mode.shard_tensor):
            yield mode.shard_module
    finally:
        for hook in hooks:
            hook.remove()


class _ShardedInit(TorchFunctionMode):
    """Run operations on shards as a single process would, on whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks, self.rank = distributed.get_world_size(), distributed.get_rank()
        self.mesh = init_device_mesh("cpu", (self.ranks,))
        self._sharded: Any = WeakIdKeyDictionary()  # parameter → its shard, for modules that share it
        # Storage of a shard → weak reference to the whole values, which live while views of them are in use.
        self._gathered: dict[int, weakref.ref[Tensor]] = {}
        self._views: Any = WeakIdKeyDictionary()  # view of the values → parameter, values

    def shard_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor as a DTensor with a copy of this rank's shard."""
        if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.ndim:
            return tensor
        whole = tensor.detach()
        chunks = whole.chunk(self.ranks)
        own = (chunks[self.rank] if self.rank < len(chunks) else whole[:0]).clone(memory_format=torch.contiguous_format)
        shape, stride = whole.shape, torch.empty(whole.shape, device="meta").stride()
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def shard_module(self, module: nn.Module) -> nn.Module:
        replace_parameters(module, self._shard_parameter)
        return module

    def _shard_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._sharded:
            sharded = self.shard_tensor(parameter)
            if sharded is parameter:
                return parameter
            self._sharded[parameter] = nn.Parameter(sharded, parameter.requires_grad)
        return self._sharded[parameter]

    def shard_child(self, _module: nn.Module, _name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.shard_module(child)

    def gather_buffer(self, _module: nn.Module, _name: str, buffer: Tensor | None) -> Tensor | None:
        """Return a whole buffer, also of a parameter that becomes one."""
        return buffer.full_tensor() if isinstance(buffer, DTensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        shards = [x for x in tensors if isinstance(x, DTensor)]
        if name in SHARD_FUNCTIONS and shards:
            return func(*args, **kwargs)
        gathered = {id(x): self._gather(x) for x in shards}
        sources = [*gathered.values(), *(self._views[x] for x in tensors if x in self._views)]
        if not sources:
            return func(*args, **kwargs)
        with torch.no_grad() if shards else nullcontext():
            given, named = tree_map_only(DTensor, lambda x: gathered[id(x)][1], (args, kwargs))
            result = func(*given, **named)
        target = kwargs.get("out", args[0] if args else kwargs.get("tensor"))
        if "out" in kwargs or name in IN_PLACE_OPERATORS or name[-1:] == "_" != name[-2:-1]:
            if isinstance(target, DTensor):
                self._keep_shard(*gathered[id(target)])
                return target
            if target in self._views:
                self._keep_shard(*self._views[target])
            return result
        storages = {values.untyped_storage().data_ptr(): (parameter, values) for parameter, values in sources}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (source := storages.get(x.untyped_storage().data_ptr())) is not None:
                self._views[x] = source
                self._gathered[_get_storage(source[0])] = weakref.ref(source[1])
        return result

    def _gather(self, tensor: DTensor) -> tuple[DTensor, Tensor]:
        """Return the parameter of a shard and its whole values. Views that are in use share these values."""
        reference = self._gathered.get(_get_storage(tensor))
        values = None if reference is None else reference()
        return tensor, tensor.full_tensor().detach() if values is None else values

    def _keep_shard(self, parameter: DTensor, values: Tensor) -> None:
        shard = get_local_shard(parameter, self.rank)
        shard.values.copy_(values[relative_slices(shard.box, full_box(shard.shape))])


def _get_storage(shard: DTensor) -> int:
    """Return the address of the storage of a shard, which `detach()` and `.data` share. No other one has it meanwhile:
    views of the whole values keep the shard.
    """
    return shard.to_local().untyped_storage()._cdata
