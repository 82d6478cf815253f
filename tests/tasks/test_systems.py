"""Systems of the sweep `systems`: each reads the image, and upcycled experts equal the dense decoder."""

import pytest
import torch

from tasks.small_vlms import ARMS, VARIANTS, made_of, scenes_of, small, task_of
from vitrail import hub, recipe
from vitrail.errors import ConfigError
from vitrail.recipe import sweep as sweeps
from vitrail.tasks.vlm_task import VLMSettings, VLMTask
from vitrail.training.stage_config import set_trainable_parts

SYSTEMS = [name for name, (sweep, _) in ARMS.items() if sweep == "systems"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_reads_the_image(name, atlas, words):
    """The loss of the answers has a gradient at the pixels of every image: at once, or for gates after one step."""
    chosen = small(name).to_dict()
    chosen["model"]["config"]["decoder"]["layers"] = 2  # VoCo tokens read the image in one layer, text reads them later
    model = recipe.build_model(recipe.Recipe.from_dict(chosen), words)
    set_trainable_parts(model, small(name).stages[-1].trainable)
    settings = small(name).task_settings(-1)
    assert isinstance(settings, VLMSettings)
    task = VLMTask(model, {"scenes": scenes_of(small(name), atlas)}, words, settings)
    made = made_of(task, {"scenes": torch.arange(4)})
    optim = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=1e-2)

    def compute_gradient() -> torch.Tensor:
        pixels = made.pixels.clone().requires_grad_()
        hidden = task.model.forward_rows(made.template, pixels, made.ids, made.question_ids, made.turn_starts)
        loss = task._token_loss(hidden, made.targets, "mean")
        optim.zero_grad()
        loss.backward()
        assert pixels.grad is not None
        return pixels.grad.flatten(1).norm(dim=1)

    first = compute_gradient()
    optim.step()
    assert bool((first > 0).all()) == (name != "system-gated")  # closed gates pass nothing
    assert bool((compute_gradient() > 0).all())


def test_systems_share_tower_decoder_data_and_budget():
    sweep = sweeps.load_sweep("systems")
    chosen = {variant.name: sweep.load_recipe(variant, 0) for variant in sweep.variants}
    base = chosen["projector"]
    for name, one in chosen.items():
        assert one.sources == base.sources and one.tokenizer == base.tokenizer
        assert [one.model.parts[part].checkpoint for part in ("tower", "decoder")] == [
            "out/qlip-scenes/final",
            "stories15M",
        ]
        assert not any(part == "tower" or part.startswith("tower.") for stage in one.stages for part in stage.trainable)
        for mine, other, stage in zip(one.stages, base.stages, one.to_dict()["stages"], strict=True):
            assert (mine.batch_size, mine.mixture, mine.dtype) == (other.batch_size, other.mixture, other.dtype)
            assert mine.steps == other.steps or name == "before training"
            assert stage["settings"] | {"balancing_loss": 0.01} == dict(other.settings) | {"balancing_loss": 0.01}
            assert (mine.optim.kind, mine.optim.lr) == (other.optim.kind, other.optim.lr) or name == "before training"


def test_upcycled_experts_equal_the_dense_decoder(tmp_path):
    dense = recipe.build_model(small("system-projector"), None).decoder
    hub.save(dense, tmp_path)
    changed = small("system-experts").to_dict()
    part = {"checkpoint": str(tmp_path), "part": "", "upcycle": True}
    changed["model"]["parts"] = {"decoder": part}
    decoder = recipe.build_model(recipe.Recipe.from_dict(changed), None).decoder
    ids = torch.arange(12)[None]
    torch.testing.assert_close(decoder(ids), dense(ids), atol=1e-5, rtol=1e-4)
    changed["model"]["parts"]["decoder"]["upcycle"] = False
    with pytest.raises(ConfigError, match="is missing"):
        recipe.build_model(recipe.Recipe.from_dict(changed), None)
    plain = small("system-projector").to_dict()
    plain["model"]["parts"] = {"decoder": part | {"upcycle": True}}
    with pytest.raises(ConfigError, match="upcycle is set, but no mixture of experts"):
        recipe.build_model(recipe.Recipe.from_dict(plain), None)


def test_balancing_loss_joins_the_answer_loss(atlas, words):
    plain, balanced = (task_of("system-experts", atlas, words, balancing_loss=weight) for weight in (0.0, 0.5))
    balanced.model.load_state_dict(plain.model.state_dict())
    batch = {"scenes": torch.arange(4)}
    difference = (balanced(batch)["answers"] - plain(batch)["answers"]) / 4
    assert 0.5 * 2 * 0.99 < difference.item() < 0.5 * 4  # two active experts under an even load, four at most
    balanced.model.eval()
    plain.model.eval()
    assert torch.equal(balanced(batch)["answers"], plain(batch)["answers"])  # in training only


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack_layers": [9]}, "has no layer 9"),
        ({"stack_layers": [2, 4]}, "2 feature layers, there is a stack connector, and the decoder adds features at 3"),
        ({"voco_tokens": 2}, "stack_layers cannot be combined with voco_tokens"),
        (
            {"stack": {"kind": "merger", "in_features": 256, "out_features": 288}},
            "stack gives 16 tokens, and connector 64",
        ),
    ],
)
def test_wrong_stack_layers_raise(changes, message):
    changed = VARIANTS["system-deepstack"]().to_dict()
    changed["model"]["config"] |= changes
    with pytest.raises(ConfigError, match=message):
        recipe.Recipe.from_dict(changed)
