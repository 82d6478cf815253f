"""Models built in shards have the weights of a single process, bit for bit, and no rank holds a whole model."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tasks.small_vlms import ARMS, small
from training import ranks
from training.test_trainer import CONFIG
from vitrail import hub, recipe
from vitrail.backbones.decoder import Decoder
from vitrail.encoders import ViT, ViTConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.recipe import Recipe
from vitrail.tasks.text_task import TextTask
from vitrail.training import distributed
from vitrail.training.sharded_init import init_in_shards

RECIPES = [*recipe.list_recipe_names(), *recipe.list_untested_recipe_names()]


def compare(build: Callable[[], nn.Module], name: str) -> None:
    """Compare a model that is built in shards, then sharded by FSDP2, with that of a single process."""
    torch.manual_seed(0)
    whole, state = build(), torch.get_rng_state()
    torch.manual_seed(0)
    with init_in_shards() as complete:
        built = complete(build())
    assert torch.equal(torch.get_rng_state(), state), name
    assert all(isinstance(p, DTensor) for p in built.parameters()), name
    task = cast(Any, SimpleNamespace(model=built))
    distributed.shard_module(distributed.TaskModule(task), torch.device("cpu"))
    assert list_shared(built) == list_shared(whole), name
    assert [p.requires_grad for p in built.parameters()] == [p.requires_grad for p in whole.parameters()]
    shards, expected = ({**dict(m.named_buffers()), **m.state_dict()} for m in (built, whole))
    assert shards.keys() == expected.keys()
    for key, tensor in shards.items():
        assert isinstance(tensor, DTensor) == (key in dict(built.named_parameters(remove_duplicate=False))), key
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        same = torch.equal(tensor, expected[key]) or bool((tensor.isnan() & expected[key].isnan()).all())
        assert same and tensor.dtype == expected[key].dtype, f"{name}: {key}"


def list_shared(model: nn.Module) -> list[set[str]]:
    """Return the names of each parameter that several modules share."""
    names: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def compare_recipes(given: list[Recipe]) -> None:
    for one in given:
        compare(lambda one=one: recipe.build_model(one, None), one.name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_models_of_recipes_have_the_weights_of_one_process(count):
    chosen = [recipe.shrink_recipe(recipe.load_recipe(name)) for name in RECIPES]
    chosen = [one for one in chosen if one.model.checkpoint is None and not one.model.parts]
    assert len(chosen) > 20
    ranks.run(count, compare_recipes, [*chosen, *map(small, ARMS)])


def compare_loaded(folder: Path) -> None:
    """A checkpoint with LoRA, a dense decoder as the start of experts, and one that gets visual experts."""
    start = recipe.shrink_recipe(recipe.load_recipe("smoke")).to_dict()
    start["model"] = {"kind": "decoder", "checkpoint": str(folder)}
    compare(lambda: recipe.build_model(Recipe.from_dict(start), None), "checkpoint")
    start["lora"] = {"rank": 2, "alpha": 4.0, "target_modules": ["*.qkv", "*.gate_up.up"]}
    for stage in start["stages"]:
        stage["trainable"] = ["*.lora"]
    compare(lambda: recipe.build_model(Recipe.from_dict(start), None), "LoRA")
    for name, upcycle in (("system-experts", True), ("system-expert", False)):
        parts = small(name).to_dict()
        parts["model"]["parts"] = {"decoder": {"checkpoint": str(folder), "part": "", "upcycle": upcycle}}
        compare(lambda parts=parts: recipe.build_model(Recipe.from_dict(parts), None), name)


@pytest.mark.slow
def test_loaded_models_have_the_weights_of_one_process(tmp_path):
    hub.save(recipe.build_model(small("system-projector"), None).decoder, tmp_path)
    ranks.run(2, compare_loaded, tmp_path)


class ParentModel(nn.Module):
    """Constructor that changes the parameters of its parts in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight  # tied
        tied = nn.Linear(4, 7)
        self.first, self.second = tied, nn.Linear(4, 7, bias=False)
        self.second.weight = tied.weight
        self.norm = nn.LayerNorm(1)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.trunc_normal_(tied.weight, std=0.02)
        nn.init.constant_(self.first.bias[:1], -4.0)
        with torch.no_grad():
            self.embed.weight[2:4] += 1
            self.embed.weight.data.view(-1)[:6].mul_(3)
            self.embed.weight.t().add_(torch.arange(7.0))
            self.first.weight.chunk(2)[1].uniform_(-1, 1)
            self.first.weight[0] = self.embed.weight[3] * torch.arange(4.0)
            self.first.bias.copy_(torch.linalg.svdvals(self.embed.weight).sum() + self.first.bias)
            torch.add(self.norm.weight, self.embed.weight.mean(), out=self.norm.bias)
        self.copy = nn.Sequential(deepcopy(self.head), nn.Linear(4, 2, dtype=torch.bfloat16))
        nn.init.orthogonal_(self.copy[0].weight)
        self.register_buffer("table", 2 * self.embed.weight.detach())
        self.register_buffer("shared", self.first.bias.detach())
        self.start = nn.Parameter(self.embed.weight.new_ones(3))
        self.embed.weight.requires_grad_(False)


class FoldedModel(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=24))
        self.image = ViT(ViTConfig(block=block, layers=1, image_size=16, patch_size=4, patch_bias=bias))
        self.image.fold_normalization([2.0, 0.5, 3.0], [0.1, -0.4, 0.2])


def compare_constructors() -> None:
    compare(ParentModel, "parent")
    for bias in (False, True):
        compare(lambda bias=bias: FoldedModel(bias), f"bias {bias}")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_changes_of_sharded_parameters_are_those_of_one_process(count):
    ranks.run(count, compare_constructors)


# ---- memory ------------------------------------------------------------------------------------------------------

LAYERS = 24


def measure_peak(folder: Path, is_whole: bool) -> None:
    """Write the peak of allocated bytes while a model is built and sharded, its bytes, and those of a block."""
    block = CONFIG.block.replace(width=128, mlp=GatedMLPConfig(intermediate_size=512))
    config = CONFIG.replace(layers=LAYERS, block=block, rotary=RotaryConfig(head_dim=64))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        with nullcontext(lambda model: model) if is_whole else init_in_shards() as complete:
            model = complete(Decoder(config))
        distributed.shard_module(distributed.TaskModule(TextTask(model)), torch.device("cpu"))
    changes = [event.nbytes() for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [4 * sum(p.numel() for p in part.parameters()) for part in (model, model.blocks[0])]
    (folder / f"rank-{distributed.get_rank()}").write_text(json.dumps([max(accumulate(changes)), *sizes]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_no_rank_holds_more_than_its_shards_and_one_block(tmp_path, count):
    for is_whole in (False, True):
        ranks.run(count, measure_peak, tmp_path, is_whole)
        for path in tmp_path.glob("rank-*"):
            peak, whole, block = json.loads(path.read_text())
            assert whole > 0.9 * LAYERS * block
            assert (peak <= whole / count + block) != is_whole, (peak, whole, block)
