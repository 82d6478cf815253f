"""QLIP task in both stages: losses, transferred weights, and recipes."""

import json
from pathlib import Path

import pytest
import torch

from helpers import randomize
from tasks.test_codec_task import load_random_lpips
from tasks.test_contrastive_task import make_named_source, make_scene_source
from training import ranks
from vitrail import hub, recipe
from vitrail.codecs.codec import Codec
from vitrail.codecs.discriminator import DiscriminatorConfig
from vitrail.codecs.presets import make_vit_codec_config
from vitrail.codecs.quantizers import BSQConfig, IdentityQuantizerConfig, VQConfig
from vitrail.data.image_captions import build_caption_source
from vitrail.data.image_collection import ImageCollection
from vitrail.data.sampler import MixtureConfig
from vitrail.data.scenes.scene_source import SceneSample
from vitrail.encoders import TextTowerConfig, ViTConfig
from vitrail.errors import ConfigError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder
from vitrail.evals.image_feature_extractor import ImageFeatureExtractor
from vitrail.models.masked_image_model import MaskedImageConfig, MaskedImageModel
from vitrail.models.qlip_model import QLIP, CodecTrainingConfig, QLIPConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.objectives.reconstruction_loss import ReconstructionWeights
from vitrail.pipelines import EmbeddingPipeline
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe.recipe_building import load_or_train_tokenizer
from vitrail.tasks.codec_task import CodecSettings, CodecTask, QuantizerWeights, loss_gradient_norms
from vitrail.tasks.contrastive_task import ContrastiveSettings, ContrastiveTask
from vitrail.tasks.qlip_task import QlipSettings, QlipTask
from vitrail.training import distributed
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=20))
TOWER = ViTConfig(image_size=16, patch_size=4, layers=1, block=BLOCK, pool="mean")
TEXT = TextTowerConfig(vocab_size=420, layers=1, block=BLOCK, context_length=64, eos_token_id=0)
CRITIC = DiscriminatorConfig(width=16, layers=1, norm="group")
BSQ = BSQConfig(bits=6)


def make_task(
    sources=None, quantizer=BSQ, tower=TOWER, bias=None, critic=None, load_network=None, **settings
) -> QlipTask:
    sources = {source.name: source for source in sources or [make_named_source()]}
    words = Tokenizer.train([t for s in sources.values() for t in build_caption_source(s).pieces.texts], 420)
    torch.manual_seed(0)
    config = QLIPConfig(
        codec=make_vit_codec_config(tower, quantizer, 6), text=TEXT, embed_dim=12, bias=bias, critic=critic
    )
    return QlipTask(randomize(QLIP(config)), sources, words, QlipSettings(**settings), load_network)


def make_batch(made: ContrastiveTask, name: str = "named", count: int = 6):
    return made.collate([SceneSample(name, i) for i in range(count)])


def make_trainer(made, folder: Path, **more) -> Trainer:
    sources = (
        {name: result.source for name, result in made.captions.items()} if hasattr(made, "captions") else made.sources
    )
    settings = {
        "name": "learn",
        "task": "any",
        "steps": 6,
        "batch_size": 6,
        "mixture": MixtureConfig(weights=dict.fromkeys(sources, 1.0)),
        "optim": OptimConfig(lr=3e-3, kind="lamb", weight_decay=0.05, max_grad_norm=5.0),
        "save_every": 3,
    }
    return Trainer(StageConfig(**(settings | more)), made, sources, folder, seed=2, quiet=True)


# ---- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "bias"),
    [({}, None), ({"matryoshka_widths": (5,), "text_text_weight": 0.5}, None), ({"swap_negatives": True}, -3.0)],
)
def test_contrastive_loss_matches_the_contrastive_task(more, bias):
    """The contrastive loss equals that of the contrastive task on the same inputs."""
    made = make_task([make_named_source(), make_scene_source()], bias=bias, **more)
    made.model.eval()
    given = made.collate([*(SceneSample("named", i) for i in range(5)), *(SceneSample("scenes", i) for i in range(4))])
    sources = {name: result.source for name, result in made.captions.items()}
    alone = ContrastiveTask(made.qlip.contrastive_model, sources, made.tokenizer, ContrastiveSettings(**more))
    torch.manual_seed(4)
    wanted = alone(given)
    torch.manual_seed(4)
    found = made(given)
    assert found.keys() == made.loss_weights.keys() == made.count_loss_terms(given).keys()
    assert found.keys() == wanted.keys() | {"l2", "commit", "entropy", "psnr"}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert made.count_flops(given) > alone.count_flops(given)


def test_reconstruction_loss_matches_the_codec_task():
    made = make_task()
    model = made.qlip.eval()
    x = made._make_batch(make_batch(made)).pixels
    drawn, codes = model.codec(x)
    found = made(make_batch(made))
    torch.testing.assert_close(found["l2"], (drawn - x).square().mean() * 6)
    for name in ("commit", "entropy"):
        torch.testing.assert_close(found[name], codes.losses[name] * 6)


def test_published_weights_and_sweeps():
    weights = make_task().loss_weights
    assert {name: weights[name] for name in ("pairs", "l2", "commit", "psnr")} == {
        "pairs": 1.0,
        "l2": 1000.0,
        "commit": 1.0,
        "psnr": 0.0,
    }
    for align, drawn in [(1.0, 0.0), (1.0, 1.0), (1.0, 1e4), (0.0, 1.0)]:
        read = QlipSettings.from_dict(
            {"contrastive_weight": align, "codec": {"weights": {"l2": drawn, "quantizer": 1.0}}}
        )
        made = make_task(**{name: getattr(read, name) for name in ("contrastive_weight", "codec")})
        assert made.loss_weights["pairs"] == align and made.loss_weights.get("l2", 0.0) == drawn
        losses = made(make_batch(made))
        sum(made.loss_weights[name] * loss for name, loss in losses.items()).backward()
        moved = made.qlip.codec.decoder.last.weight.grad
        assert (moved is not None and moved.abs().sum() > 0) == (drawn > 0)
        assert (made.qlip.text.embed.weight.grad.abs().sum() > 0) == (align > 0)
    with pytest.raises(ConfigError, match="-1"):
        QlipSettings(contrastive_weight=-1.0)
    with pytest.raises(ConfigError, match="images have the tower"):
        QlipSettings(codec=CodecSettings(image_size=8))


def test_images_are_encoded_once():
    made, calls = make_task(), []
    run = made.qlip.codec.encoder._forward
    made.qlip.codec.encoder._forward = lambda *given: (calls.append(1), run(*given))[1]
    made(make_batch(made))
    assert len(calls) == 1


def test_perceptual_and_gan_losses_in_the_first_stage():
    """Their memory measurements depend on it."""
    codec = CodecSettings(weights=ReconstructionWeights(l2=1000.0, perceptual=0.1, gan=0.1, quantizer=1.0))
    made = make_task(critic=CRITIC, load_network=load_random_lpips, codec=codec)
    losses = made(make_batch(made))
    assert {"pairs", "perceptual", "gan", "critic"} <= losses.keys() == made.loss_weights.keys()
    sum(made.loss_weights[name] * loss for name, loss in losses.items()).backward()
    assert all(p.grad is not None for p in made.qlip.parameters())


def test_gradient_norms_of_contrastive_and_pixel_losses():
    made = make_task(text_text_weight=0.5)
    norms = loss_gradient_norms(made, make_batch(made))
    assert norms.keys() == {"pairs", "l2", "commit", "entropy"} and all(norm > 0 for norm in norms.values())
    at = made.qlip.codec.encoder.blocks[-1].branches["mlp"].op.down.weight
    made.model.eval()
    (made(make_batch(made))["pairs"] / 6).backward()
    assert norms["pairs"] == pytest.approx(at.grad.norm().item(), rel=1e-4)


# ---- runs and transferred weights -------------------------------------------------------------------------------


class Interruption(Exception):
    pass


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16", "gradient_accumulation_steps": 2}])
def test_resumed_run_matches_uninterrupted_run(more, tmp_path, monkeypatch):
    whole = make_trainer(make_task(), tmp_path / "whole", **more).train().state_dict()
    step = Trainer._train_step

    def interrupted_step(self, *given):
        if self.step == 4:
            raise Interruption
        return step(self, *given)

    monkeypatch.setattr(Trainer, "_train_step", interrupted_step)
    with pytest.raises(Interruption):
        make_trainer(make_task(), tmp_path / "cut", **more).train()
    monkeypatch.setattr(Trainer, "_train_step", step)
    again = make_trainer(make_task(), tmp_path / "cut", **more).train().state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_both_losses_decrease(tmp_path):
    made = make_task([make_named_source(exclude_names=("Dog",))])
    make_trainer(
        made, tmp_path, steps=60, batch_size=16, save_every=60, optim=OptimConfig(lr=6e-3, weight_decay=0.0)
    ).train()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for name, most in (("loss/pairs", 0.9), ("loss/l2", 0.8)):  # equal names share the targets of a row
        assert sum(r[name] for r in rows[-10:]) < most * sum(r[name] for r in rows[:10]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_stage_freezes_the_encoder(tmp_path, dtype):
    first = make_task(critic=CRITIC)
    model = make_trainer(first, tmp_path / "align", dtype=dtype).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    source = first.captions["named"].source
    settings = CodecSettings(weights="qlip-stage-2", quantizer=QuantizerWeights(commit=0.0))
    second = CodecTask(model, {"named": source}, settings, load_random_lpips)
    assert second.loss_weights.keys() == {"l2", "perceptual", "gan", "entropy", "critic", "psnr"}
    parts = ("codec.pre_quant_proj", "codec.decoder", "critic")
    after = make_trainer(second, tmp_path / "sharpen", trainable=parts, dtype=dtype).train().state_dict()
    for name, value in before.items():
        if not name.startswith((*parts, "critic.net.last.bias")):
            assert torch.equal(after[name], value), name
    assert not torch.equal(after["codec.decoder.last.weight"], before["codec.decoder.last.weight"])
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    again = make_task(critic=CRITIC).qlip
    again.load_state_dict(before)
    assert torch.equal(again.encode_image(x), model.encode_image(x))


def test_suites_support_the_model():
    made = make_task()
    model = made.qlip
    looks = ImagePreprocessor.default(model.config.image)
    viewer, embedder = (
        ImageFeatureExtractor(model, looks),
        ContrastiveEmbedder(model.contrastive_model, looks, made.tokenizer),
    )
    shown = [torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8).numpy() for _ in range(3)]
    assert viewer.extract_features(shown).shape == (3, 16) and embedder.embed_images(shown).shape == (3, 12)
    assert embedder.embed_texts(["a dog", "an owl"]).shape == (2, 12)


def test_eval_command_loads_the_contrastive_part(tmp_path):
    made = make_task()
    hub.save(made.qlip, tmp_path, made.tokenizer)
    embedder = EmbeddingPipeline.load(tmp_path, device="cpu").build_embedder()
    image = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8).numpy()
    assert embedder.embed_images([image]).shape == (1, 12) and embedder.embed_texts(["a dog"]).shape == (1, 12)


# ---- recipes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def synthetic_data(monkeypatch):
    """Random LPIPS weights and synthetic images."""
    monkeypatch.setattr("vitrail.tasks.qlip_task.load_lpips", load_random_lpips)
    monkeypatch.setattr("vitrail.tasks.codec_task.load_lpips", load_random_lpips)
    kept = make_named_source()
    monkeypatch.setattr(
        "vitrail.data.named_images.load_collection",
        lambda *_: ImageCollection(kept.records, kept.pixels(torch.arange(len(kept)))),
    )


CODEC = make_vit_codec_config(TOWER, BSQ, 6)
DRAW = {"weights": {"l2": 1.0, "perceptual": 0.1, "gan": 0.1, "quantizer": 1.0}, "gan_start": 1}
SMALL = {
    "name": "small",
    "description": "a test",
    "tokenizer": {"vocab_size": 300},
    "model": {
        "kind": "qlip",
        "config": QLIPConfig(codec=CODEC, text=TEXT.replace(vocab_size=300), embed_dim=8, critic=CRITIC).to_dict(),
    },
    "sources": {
        "shown": {"kind": "named", "datasets": ["x"], "image_size": 16, "augmentation": {"flip_probability": 0.5}}
    },
    "stages": [
        {
            "name": "align",
            "task": "qlip",
            "steps": 3,
            "batch_size": 4,
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"kind": "lamb", "lr": 1e-3, "param_groups": [{"part": "codec.encoder", "lr": 2e-3}]},
            "settings": {"matryoshka_widths": [4]},
        },
        {
            "name": "sharpen",
            "task": "codec",
            "steps": 2,
            "batch_size": 4,
            "trainable": ["codec.pre_quant_proj", "codec.decoder", "critic"],
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"lr": 1e-3, "max_grad_norm": 1.0},
            "settings": DRAW,
        },
    ],
}


def test_two_stage_recipe_gives_one_model(synthetic_data, tmp_path):
    made = recipe.train_recipe(recipe.Recipe.from_dict(SMALL), tmp_path, quiet=True)
    again, x = hub.load(tmp_path / "final"), torch.rand(2, 3, 16, 16) * 2 - 1
    assert isinstance(again, QLIP) and again.critic is None and int(made.critic.passes) == 2
    assert torch.equal(again.codec.encode(x).ids, made.eval().codec.encode(x).ids)
    assert hub.load_tokenizer(tmp_path / "final").vocab_size <= 300
    recipe.train_recipe(recipe.Recipe.from_dict(SMALL), tmp_path, quiet=True)  # finished runs are skipped


def test_quantizer_can_be_added_later(synthetic_data, tmp_path):
    """QLIP's second recipe: continuous codes first, then a quantizer between encoder and decoder."""
    open_ = QLIPConfig(
        codec=CODEC.replace(quantizer=IdentityQuantizerConfig(dim=6)), text=TEXT.replace(vocab_size=300), embed_dim=8
    )
    first = {**SMALL, "model": {"kind": "qlip", "config": open_.to_dict()}, "stages": SMALL["stages"][:1]}
    recipe.train_recipe(recipe.Recipe.from_dict(first), tmp_path / "open", quiet=True)
    start = {"checkpoint": str(tmp_path / "open" / "final")}
    parts = {f"codec.{part}": start for part in ("encoder", "pre_quant_proj", "decoder")}
    config = CodecTrainingConfig(codec=CODEC, critic=CRITIC).to_dict()
    late = {key: value for key, value in SMALL.items() if key != "tokenizer"}
    late |= {"model": {"kind": "codec-training", "config": config, "parts": parts}, "stages": SMALL["stages"][1:]}
    model = recipe.build_model(recipe.Recipe.from_dict(late), None)
    before = hub.load(tmp_path / "open" / "final")
    assert torch.equal(model.codec.pre_quant_proj.weight, before.codec.pre_quant_proj.weight)
    recipe.train_recipe(recipe.Recipe.from_dict(late), tmp_path / "late", quiet=True)
    after = hub.load(tmp_path / "late" / "final")
    assert isinstance(after, Codec) and after.bits == 6
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    assert torch.equal(after.forward_features(x), before.codec.forward_features(x))  # so text embeddings still match


@pytest.mark.parametrize("kind", ["masked", "clip"])
def test_encoder_starts_from_another_tower(kind, synthetic_data, tmp_path):
    if kind == "masked":
        other, part = MaskedImageModel(MaskedImageConfig(image=TOWER.replace(mask_token=True))), "image"
    else:
        other, part = make_task().qlip.contrastive_model, "image"
    hub.save(other, tmp_path)
    parts = {"codec.encoder": {"checkpoint": str(tmp_path), "part": part}}
    read = recipe.Recipe.from_dict({**SMALL, "model": {**SMALL["model"], "parts": parts}})
    model = recipe.build_model(read, None)
    for name, weight in model.codec.encoder.named_parameters():
        assert torch.equal(weight, other.image.get_parameter(name)), name


RECIPE_FILES = sorted(
    path
    for kind in ("codec", "qlip")
    for path in recipe.recipe_folder().glob(f"**/{kind}-*.toml")
    if path.parent.name != "sweeps"
)


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: path.stem)
def test_recipes_load_and_share_a_shape(path, synthetic_data):
    read = recipe.load_recipe(path)
    assert read.name == path.stem
    config = read.build_model_config()
    codec = getattr(config, "codec", config)
    with torch.device("meta"):
        made = Codec(codec)
    shape = codec.net.encoder
    assert (shape.layers, shape.block.width, shape.grid_size, codec.net.decoder.layers) == (8, 256, 8, 8)
    alike = path.stem.startswith("codec-") and path.stem != "codec-kl"
    assert made.bits == (12 if alike else 0 if path.stem in ("codec-kl", "qlip-open") else 28)


def test_tokenizer_of_a_two_stage_recipe(tmp_path):
    """The tokenizer is trained on the texts of all stages, even if the last stage has none."""
    read = recipe.load_recipe("qlip-cifar")
    assert [stage.task for stage in read.stages] == ["qlip", "codec"]
    words = load_or_train_tokenizer(read, tmp_path, {"train": make_named_source()})
    assert words is not None and words.vocab_size > 300


def _is_self_contained(read: recipe.Recipe) -> bool:
    """Whether a recipe uses named images and needs no pretrained model."""
    return "train" in read.sources and not any(
        start.startswith("out/") for start in recipe.collect_checkpoints(read).values()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in RECIPE_FILES if _is_self_contained(recipe.load_recipe(p))], ids=lambda p: p.stem
)
def test_recipes_run_a_step(path, synthetic_data, tmp_path):
    sources = {"sources.train.image_size": "32", "sources.test.image_size": "32"}
    made = recipe.train_recipe(recipe.shrink_recipe(recipe.load_recipe(path, sources)), tmp_path, quiet=True)
    again, x = hub.load(tmp_path / "final"), torch.rand(2, 3, 32, 32) * 2 - 1
    codecs = [getattr(model, "codec", model).eval() for model in (made, again)]
    assert torch.equal(codecs[0].reconstruct(x), codecs[1].reconstruct(x))


# ---- many processes ---------------------------------------------------------------------------------------------


def save_summed_gradients(folder: str) -> None:
    """Each rank has an unequal part of the batch; gradients are summed as in the trainer."""
    made = make_task([make_named_source(templates=("{}",))], matryoshka_widths=(5,))  # no randomness
    given = made.collate(
        [[SceneSample("named", i) for i in share] for share in ((0, 1, 2, 3), (4, 5))][distributed.get_rank()]
    )
    counts = distributed.sum_over_ranks(made.count_loss_terms(given))
    losses = made(given)
    sum(made.loss_weights[name] * loss / counts[name] for name, loss in losses.items()).backward()
    found = {}
    for name, p in made.model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(found[name])
    if distributed.get_rank() == 0:
        torch.save(found, Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_processes_match_the_gradients_of_one(tmp_path):
    ranks.run(2, save_summed_gradients, str(tmp_path))
    found, made = (
        torch.load(tmp_path / "found.pt"),
        make_task([make_named_source(templates=("{}",))], matryoshka_widths=(5,)),
    )
    losses = made(make_batch(made))
    sum(made.loss_weights[name] * loss / 6 for name, loss in losses.items()).backward()
    for name, p in made.model.named_parameters():
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(mine, found[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def train_on_rank(folder: Path) -> None:
    made = make_task(critic=CRITIC, quantizer=VQConfig(codebook_size=16, dim=6, kmeans_iters=1))
    make_trainer(made, folder, batch_size=7).train()


@pytest.mark.slow
def test_sharded_run(tmp_path):
    """The unused critic does not block distributed training."""
    ranks.run(2, train_on_rank, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and rows[-1]["loss"] < 1.5 * rows[0]["loss"]
