"""Contrastive task: token ids, losses, and equality of one and several processes."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data.scenes.conftest import drawn
from helpers import randomize
from training.ranks import run
from vitrail import hub, recipe
from vitrail.data.image_captions import build_caption_source
from vitrail.data.image_collection import ImageCollection
from vitrail.data.image_readers import ImageRecord
from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSample, SceneSource, SceneSourceConfig
from vitrail.encoders import ConvTowerConfig, TextTowerConfig, ViTConfig
from vitrail.errors import ConfigError
from vitrail.evals.contrastive_embedder import tokenize_texts
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, cost
from vitrail.objectives.contrastive_loss import reference_clip_loss, reference_siglip_loss
from vitrail.processing.tokenizer import Tokenizer
from vitrail.tasks.contrastive_task import MAX_LOG_SCALE, ContrastiveSettings, ContrastiveTask
from vitrail.training import distributed
from vitrail.training.distributed import get_rank

NAMES = ("dog", "owl", "dog", "red car", "hat", "Dog")
BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=20))
TOWERS = {
    "conv": ConvTowerConfig(image_size=16, widths=(8, 8), blocks=(1, 1), norm_groups=4),
    "vit": ViTConfig(image_size=16, patch_size=4, layers=1, block=BLOCK, pool="mean"),
    "naflex": ViTConfig(image_size=16, patch_size=4, layers=1, block=BLOCK, pool="mean", patch_order="channels_last"),
}


def make_named_source(name: str = "named", **change) -> NamedImageSource:
    pixels = torch.randint(
        0, 256, (len(NAMES), 4, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    image_records = tuple(ImageRecord(f"a/{n}", "a", str(n), text, ("thing",)) for n, text in enumerate(NAMES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.data.named_images.load_collection", lambda *_: ImageCollection(image_records, pixels))
        return NamedImageSource(NamedImagesConfig(datasets=("x",), image_size=16, **change), name)


def make_scene_source(**scene) -> SceneSource:
    config = SceneSourceConfig(atlas="none.safetensors", preset="relations", image_size=16, seed=5, scene=scene)
    return SceneSource(config, Atlas.build(drawn()), "scenes")


def make_task(sources=None, tower="conv", bias=None, eos=True, **settings) -> ContrastiveTask:
    sources = {source.name: source for source in sources or [make_named_source()]}
    words = Tokenizer.train([t for s in sources.values() for t in build_caption_source(s).pieces.texts], 420)
    text = TextTowerConfig(vocab_size=420, layers=1, block=BLOCK, context_length=64, eos_token_id=0)
    if not eos:
        text = text.replace(eos_token_id=None, pool="last", causal=False, head_width=12)
    config = ContrastiveConfig(image=TOWERS[tower], text=text, embed_dim=12, bias=bias)
    model = randomize(ContrastiveModel(config))
    return ContrastiveTask(model, sources, words, ContrastiveSettings(**settings))


def make_batch(made: ContrastiveTask, name: str = "named", count: int = 6):
    return made.collate([SceneSample(name, i) for i in range(count)])


def embed_pairs(made: ContrastiveTask, name: str, index, texts: list[str]):
    """Embed images and texts with public functions: pixels unchanged, texts through `tokenize_texts`."""
    source = made.captions[name].source
    x = source.pixels(index) if name == "named" else source.render_indices(index).pixels
    x = x / 255
    x = x[:, :3] * x[:, 3:] + 1 - x[:, 3:] if x.shape[1] == 4 else x
    ids, cut = tokenize_texts(texts, made.tokenizer, made.model.config.text)
    assert not cut
    return made.model.encode_image(x * 2 - 1), made.model.encode_text(ids)


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize("eos", [True, False])
def test_loss_uses_name_labels(tower, bias, eos):
    made = make_task(tower=tower, bias=bias, eos=eos)
    made.model.eval()
    loss = made(make_batch(made))
    u, v = (F.normalize(x, dim=-1) for x in embed_pairs(made, "named", torch.arange(6), list(NAMES)))
    same = torch.tensor([[a.lower() == b.lower() for b in NAMES] for a in NAMES])
    scale = made.model.scale
    wanted = (
        reference_clip_loss(u, v, scale, same)
        if bias is None
        else reference_siglip_loss(u, v, scale, made.model.bias, same)
    )
    assert made.count_loss_terms(make_batch(made)) == {"pairs": 6}
    torch.testing.assert_close(loss["pairs"], wanted * 6, rtol=1e-4, atol=1e-4)


def test_naflex_images_keep_their_aspect_ratio():
    """Sources of unequal shapes share a batch, with the embeddings of each source alone."""
    wide = make_scene_source(aspect_ratio=(2, 1))
    assert wide.image_shape == (16, 32)
    made = make_task([make_named_source(), wide], tower="naflex", bias=-3.0)
    made.model.eval()
    batch = make_batch(made) | make_batch(made, "scenes", 4)
    given = made._make_batch(batch)
    assert given.grids == [(4, 4)] * 6 + [(3, 5)] * 4  # at most 4 × 4 patches
    together = made.model.encode_image(given.pixels, given.grids)
    assert together.shape == (10, 12)
    alone = made._make_batch(make_batch(made, "scenes", 4))
    assert alone.grids is None and alone.pixels.shape == (4, 3, 12, 20)
    torch.testing.assert_close(together[6:], made.model.encode_image(alone.pixels), rtol=1e-4, atol=1e-5)
    loss = made(batch)["pairs"]
    loss.backward()
    assert loss.isfinite() and made.model.image.embed.proj.weight.grad.abs().sum() > 0


def test_patch_counts_are_drawn_for_each_batch():
    made = make_task(tower="naflex", patch_counts=(4, 9, 25))
    made.model.train()
    torch.manual_seed(1)
    shapes = {made._make_batch(make_batch(made)).pixels.shape[-1] for _ in range(30)}
    assert shapes == {8, 12, 20}
    made.model.eval()
    assert {made._make_batch(make_batch(made)).pixels.shape[-1] for _ in range(5)} == {8}
    assert make_task(tower="naflex").count_flops(make_batch(made)) > made.count_flops(make_batch(made)) > 0
    with pytest.raises(ConfigError, match="needs a NaFlex tower"):
        make_task(tower="vit", patch_counts=(4,))


def test_training_ids_match_evaluation_ids():
    """Tokenizing pieces and whole texts gives the same ids for all captions."""
    sources = [make_named_source(keyword_probability=0.3), make_scene_source()]
    made = make_task(sources, swap_negatives=True)
    for name, count in (("named", 6), ("scenes", 30)):
        result = made.captions[name]
        for _ in range(5):
            pair = result.make_batch(torch.arange(count), swap_negatives=True)
            for rows in (pair.captions, pair.negative_captions):
                if rows is not None:
                    wanted, cut = tokenize_texts(result.pieces.to_texts(rows), made.tokenizer, made.model.config.text)
                    assert not cut and torch.equal(made._token_ids(name, rows)[:, : wanted.shape[1]], wanted)


def test_negative_captions_match_nothing():
    made = make_task([make_scene_source()], swap_negatives=True)
    made.model.eval()
    index = torch.arange(8)
    torch.manual_seed(4)
    pair = made.captions["scenes"].make_batch(index, randomize=False, swap_negatives=True)
    read = made.captions["scenes"].pieces.to_texts
    there = pair.negative_captions.any(1)
    assert there.float().mean() > 0.5 and read(pair.captions)[0] != read(pair.negative_captions)[0]
    u, v = embed_pairs(
        made,
        "scenes",
        index,
        read(pair.captions) + [text for text, is_ in zip(read(pair.negative_captions), there, strict=True) if is_],
    )
    same = torch.cat([torch.eye(8, dtype=torch.bool), torch.zeros(8, int(there.sum()), dtype=torch.bool)], 1)
    wanted = reference_clip_loss(F.normalize(u, dim=-1), F.normalize(v, dim=-1), made.model.scale, same)
    torch.manual_seed(4)
    torch.testing.assert_close(made(make_batch(made, "scenes", 8))["pairs"], wanted * 8, rtol=1e-4, atol=1e-4)


def test_matryoshka_losses():
    made = make_task(matryoshka_widths=(3, 7))
    made.model.eval()
    u, v = embed_pairs(made, "named", torch.arange(6), list(NAMES))
    same = torch.tensor([[a.lower() == b.lower() for b in NAMES] for a in NAMES])
    each = [
        reference_clip_loss(F.normalize(u[:, :w], dim=-1), F.normalize(v[:, :w], dim=-1), made.model.scale, same)
        for w in (3, 7, 12)
    ]
    torch.testing.assert_close(made(make_batch(made))["pairs"], sum(each) / 3 * 6, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="12"):
        make_task(matryoshka_widths=(12,))


def test_equal_captions_match():
    from vitrail.tasks.image_text_task import hash_texts

    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 0], [7, 6, 5, 0], [6, 5, 7, 0], [5, 6, 7, 1]])
    marks = hash_texts(ids).tolist()
    assert marks[0] == marks[1] and len(set(marks)) == 4 and min(marks) >= 1 << 62
    many = torch.randint(0, 50, (20000, 6)).unique(dim=0)
    assert len(hash_texts(many).unique()) == len(many)


def test_text_text_loss():
    made = make_task(text_text_weight=0.5)
    assert (
        made.loss_weights == {"pairs": 1.0, "texts": 0.5} == made.count_loss_terms(make_batch(made)) | made.loss_weights
    )
    loss = made(make_batch(made))
    assert loss.keys() == made.loss_weights.keys() == made.count_loss_terms(make_batch(made)).keys()
    loss["texts"].backward()
    assert all(p.grad is None for p in made.model.image.parameters())
    assert made.model.text.embed.weight.grad.abs().sum() > 0


def test_flops_count_every_text():
    """Second captions and negative captions cost as much as captions."""
    plain, twice = make_task(), make_task(text_text_weight=0.5)
    text = plain.model.text
    assert twice.count_flops(make_batch(twice)) - plain.count_flops(make_batch(plain)) == cost.count_flops(
        text, text.workload(6)
    )
    one, false = (make_task([make_scene_source()], swap_negatives=swapped) for swapped in (False, True))
    given = make_batch(one, "scenes", 5)
    assert false.count_flops(given) - one.count_flops(given) == cost.count_flops(text, text.workload(5))


def test_equal_names_match_across_sources():
    made = make_task([make_named_source("a"), make_named_source("b"), make_scene_source()])
    made.model.eval()
    batches = made.collate(
        [
            SceneSample("a", 0),
            SceneSample("b", 5),
            SceneSample("b", 1),
            SceneSample("scenes", 0),
            SceneSample("scenes", 1),
        ]
    )
    labels = made._make_batch(batches).labels.tolist()
    assert labels[0] == labels[1] and len(set(labels)) == 4


@pytest.mark.parametrize(("start", "slope", "learns"), [(3.0, -1, True), (6.0, -1, False), (6.0, 1, True)])
def test_logit_scale_is_capped_at_100(start, slope, learns):
    from vitrail.tasks.contrastive_task import _ClampWithGradient

    x = torch.tensor(start, requires_grad=True)
    y = _ClampWithGradient.apply(x, MAX_LOG_SCALE)
    assert y.item() == pytest.approx(min(start, math.log(100)))
    (slope * y).backward()
    assert (x.grad != 0) == learns


def test_invalid_arguments_raise():
    with pytest.raises(ConfigError, match="swap_negatives"):
        make_task(swap_negatives=True)
    other = make_task()
    wrong = ContrastiveModel(other.model.config.replace(text=other.model.config.text.replace(eos_token_id=7)))
    with pytest.raises(ConfigError, match="eos_token_id to 0"):
        ContrastiveTask(wrong, {"named": make_named_source()}, other.tokenizer, ContrastiveSettings())
    with pytest.raises(ConfigError, match="tokenizer"):
        ContrastiveTask(make_task().model, {"named": make_named_source()}, None, ContrastiveSettings())
    long = make_named_source(templates=("1234567890" * 8 + " {}",))
    with pytest.raises(ConfigError, match="context"):
        make_task([long])


# ---- many processes ---------------------------------------------------------------------------------------------


def _gradients(bias: float | None) -> tuple[ContrastiveTask, list[torch.Tensor]]:
    made = make_task([make_named_source(templates=("{}",))], bias=bias, matryoshka_widths=(5,))  # no randomness
    made.model.train()
    return made, list(made.model.parameters())


def save_summed_gradients(bias: float | None, folder: str) -> None:
    """Each rank has an unequal part of the batch; gradients are summed as in the trainer."""
    made, weights = _gradients(bias)
    mine = [[SceneSample("named", i) for i in share] for share in ((0, 1, 2, 3), (4, 5))][get_rank()]
    made.model.eval()
    judged = made(make_batch(made))["pairs"].item() / 6  # every rank has the whole batch
    made.model.train()
    given = made.collate(mine)
    losses, counts = made(given), distributed.sum_over_ranks(made.count_loss_terms(given))
    (losses["pairs"] / counts["pairs"]).backward()
    total = distributed.sum_over_ranks({"pairs": losses["pairs"].item()})["pairs"] / counts["pairs"]
    for p in weights:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(grad)
        p.grad = grad
    if get_rank() == 0:
        torch.save({"judged": judged, "loss": total, "grads": [p.grad for p in weights]}, Path(folder) / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, -3.0])
def test_two_processes_match_the_gradients_of_one(bias, tmp_path):
    run(2, save_summed_gradients, bias, str(tmp_path))
    found = torch.load(tmp_path / "found.pt")
    made, weights = _gradients(bias)
    loss = made(make_batch(made))["pairs"] / 6
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["judged"] == pytest.approx(loss.item(), rel=1e-5)
    for p, other in zip(weights, found["grads"], strict=True):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, other, rtol=1e-3, atol=1e-5)


def train_on_rank(folder: str) -> None:
    """A run of the trainer with sharded weights."""
    kept = make_named_source()
    with pytest.MonkeyPatch.context() as patch:
        shown = ImageCollection(kept.records, kept.pixels(torch.arange(len(kept))))
        patch.setattr("vitrail.data.named_images.load_collection", lambda *_: shown)
        plain = {**RECIPE["sources"]["shown"], "augmentation": {}, "templates": ["{}"]}
        recipe.train_recipe(
            recipe.Recipe.from_dict({**RECIPE, "sources": {"shown": plain}}), Path(folder), device="cpu", quiet=True
        )


@pytest.mark.slow
def test_two_process_run_matches_one_process(tmp_path):
    run(2, train_on_rank, str(tmp_path / "two"))
    train_on_rank(str(tmp_path / "one"))
    one, two = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "learn" / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4) and len(one) == 3


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPE = {
    "name": "small",
    "description": "a test",
    "tokenizer": {"vocab_size": 300},
    "model": {
        "kind": "contrastive",
        "config": ContrastiveConfig(
            image=TOWERS["vit"],
            text=TextTowerConfig(vocab_size=300, layers=1, block=BLOCK, context_length=40, eos_token_id=0),
            embed_dim=8,
        ).to_dict(),
    },
    "sources": {
        "shown": {"kind": "named", "datasets": ["x"], "image_size": 16, "augmentation": {"flip_probability": 0.5}}
    },
    "stages": [
        {
            "name": "learn",
            "task": "contrastive",
            "steps": 3,
            "batch_size": 4,
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"lr": 1e-3},
            "settings": {"matryoshka_widths": [4]},
        }
    ],
}


@pytest.fixture
def synthetic_images(monkeypatch):
    kept = make_named_source()
    monkeypatch.setattr(
        "vitrail.data.named_images.load_collection",
        lambda *_: ImageCollection(kept.records, kept.pixels(torch.arange(len(kept)))),
    )


def test_recipe_saves_parts_that_initialise_others(synthetic_images, tmp_path, capsys):
    first = recipe.train_recipe(recipe.Recipe.from_dict(RECIPE), tmp_path / "a", quiet=True)
    folder = tmp_path / "a" / "final"
    again = hub.load(folder)
    assert isinstance(again, ContrastiveModel) and torch.equal(again.text.embed.weight, first.text.embed.weight)
    assert hub.load_tokenizer(folder).vocab_size <= 300
    config = RECIPE["model"]["config"]
    masked = {**config, "image": {**config["image"], "mask_token": True}}
    other = {
        **RECIPE,
        "model": {"kind": "contrastive", "config": masked, "parts": {"image": {"checkpoint": str(folder)}}},
    }
    model = recipe.build_model(recipe.Recipe.from_dict(other), None)
    assert torch.equal(model.image.embed.proj.weight, again.image.embed.proj.weight)
    assert not torch.equal(model.text.embed.weight, again.text.embed.weight)
    assert "except mask" in capsys.readouterr().err
    hub.save(again.image, tmp_path / "tower")  # a tower alone works too
    alone = {"image": {"checkpoint": str(tmp_path / "tower"), "part": ""}}
    model = recipe.build_model(recipe.Recipe.from_dict({**RECIPE, "model": {**RECIPE["model"], "parts": alone}}), None)
    assert torch.equal(model.image.embed.proj.weight, again.image.embed.proj.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": {"checkpoint": "FOLDER", "part": "nothing"}}, "nothing"),
        ({"image": {"checkpoint": "FOLDER", "part": "text"}}, "cannot load"),
        ({"tower": {"checkpoint": "FOLDER"}}, "tower"),
    ],
)
def test_incompatible_parts_raise(change, message, synthetic_images, tmp_path):
    recipe.train_recipe(recipe.shrink_recipe(recipe.Recipe.from_dict(RECIPE)), tmp_path, quiet=True)
    for part in change.values():
        part["checkpoint"] = str(tmp_path / "final")
    other = {**RECIPE, "model": {**RECIPE["model"], "parts": change}}
    with pytest.raises(ConfigError, match=message):
        recipe.build_model(recipe.Recipe.from_dict(other), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"kind": "vit", "config": TOWERS["vit"].to_dict()}}, "trains a Contrastive"),
        ({"sources": {"shown": {"kind": "text", "package": "python-docs"}}}, "named or scenes"),
        ({"sources": {"shown": {"kind": "named", "datasets": ["x"], "image_siz": 3}}}, "image_size"),
        (
            {"sources": {"shown": {"kind": "named", "datasets": ["x"], "augmentation": {"flip_probabilit": 1}}}},
            "flip_probability",
        ),
    ],
)
def test_unsupported_sources_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        recipe.Recipe.from_dict({**RECIPE, **change})


def test_unknown_settings_raise():
    stage = {**RECIPE["stages"][0], "settings": {"width": [4]}}
    with pytest.raises(ConfigError, match=r"stages\.0\.settings\.width'[\s\S]*matryoshka_widths"):
        recipe.Recipe.from_dict({**RECIPE, "stages": [stage]})


def test_teacher_must_be_pretrained():
    tower = TOWERS["vit"].to_dict()
    model = {"kind": "masked", "config": {"image": {**tower, "mask_token": True}, "teacher": tower}}
    stage = {**RECIPE["stages"][0], "task": "mim", "settings": {}}
    read = recipe.Recipe.from_dict({**RECIPE, "tokenizer": None, "model": model, "stages": [stage]})
    with pytest.raises(ConfigError, match="teacher"):
        recipe.build_model(read, None)
