"""Q-Former task: losses by hand, hard negatives, and equality of one and several processes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from tasks.test_contrastive_task import BLOCK, NAMES, make_named_source, make_scene_source
from training.ranks import run
from vitrail import hub, recipe
from vitrail.connectors import QFormerConfig
from vitrail.data.image_captions import build_caption_source
from vitrail.data.image_collection import ImageCollection
from vitrail.data.scenes.scene_source import SceneSample
from vitrail.encoders import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.text_qformer import TextQFormer, TextQFormerConfig
from vitrail.processing.tokenizer import Tokenizer
from vitrail.tasks.qformer_task import QFormerSettings, QFormerTask
from vitrail.training import distributed
from vitrail.training.distributed import get_rank

SPECIALS = ("<|endoftext|>", "[CLS]", "[DEC]")
CONFIG = TextQFormerConfig(
    tower=ViTConfig(image_size=16, patch_size=4, layers=1, block=BLOCK),
    qformer=QFormerConfig(
        in_features=16, out_features=12, num_queries=3, layers=2, width=20, heads=2, intermediate_size=24, use_text=True
    ),
    vocab_size=420,
    context_length=64,
    cls_token_id=1,
    eos_token_id=0,
    decoder_start_token_id=2,
    log_scale=1.0,
)
SAME = torch.tensor([[a.lower() == b.lower() for b in NAMES] for a in NAMES])


def make_task(sources=None, config=CONFIG, specials=SPECIALS, **settings) -> QFormerTask:
    sources = {source.name: source for source in sources or [make_named_source(templates=("{}",))]}
    texts = [text for source in sources.values() for text in build_caption_source(source).pieces.texts]
    words = Tokenizer.train(texts, 420, special_tokens=specials, eos=specials[0])
    return QFormerTask(randomize(TextQFormer(config)), sources, words, QFormerSettings(**settings))


def make_batch(made: QFormerTask, name: str = "named", count: int = 6):
    return made.collate([SceneSample(name, i) for i in range(count)])


def pick_likeliest_negatives(logits, own):
    """Pick the most likely negative instead of sampling."""
    found = logits.detach().masked_fill(own, -torch.inf).argmax(1)
    return found.masked_fill(own.all(1), -1)


@pytest.fixture
def deterministic_negatives(monkeypatch):
    monkeypatch.setattr("vitrail.tasks.qformer_task.sample_hard_negatives", pick_likeliest_negatives)


def test_texts_have_cls_eos_and_padding():
    made = make_task()
    ids = made._make_batch(make_batch(made)).caption_ids
    assert ids[:, 0].tolist() == [1] * 6 and ids.shape == (6, 64)
    for row in ids.tolist():
        end = row.index(0)
        assert set(row[end + 1 :]) == {-1} and min(row[1:end]) > 2


@pytest.mark.parametrize("training", [True, False])
def test_losses_match_their_definitions(training, deterministic_negatives):
    made = make_task()
    made.model.train(training)
    smoothing = 0.1 if training else 0.0
    found, model = made(make_batch(made)), made.model
    given = made._make_batch(make_batch(made))
    features, ids = model.forward_features(given.pixels), given.caption_ids
    # itc: all pairs, one by one.
    scale = model.log_scale.exp()
    sims = torch.stack(
        [torch.cat([model(given.pixels[i : i + 1], ids[j : j + 1])[0] for j in range(6)]) for i in range(6)]
    )
    target = SAME / SAME.sum(1, keepdim=True) * (1 - smoothing) + smoothing / 6
    logits = scale * sims
    wanted = -(target * (logits.log_softmax(1) + logits.T.log_softmax(1))).sum() / 2
    torch.testing.assert_close(found["itc"], wanted, rtol=1e-4, atol=1e-4)
    # itm: true pairs, and the most likely negatives.
    pictures, texts = pick_likeliest_negatives(logits.T, SAME), pick_likeliest_negatives(logits, SAME)
    pairs = [(i, i, 1) for i in range(6)]
    pairs += [(int(pictures[i]), i, 0) for i in range(6)] + [(i, int(texts[i]), 0) for i in range(6)]
    each = [
        F.cross_entropy(model.compute_match_logits(features[i : i + 1], ids[j : j + 1]), torch.tensor([answer]))
        for i, j, answer in pairs
    ]
    torch.testing.assert_close(found["itm"], torch.stack(each).mean() * 6, rtol=1e-4, atol=1e-4)
    # itg: text by text and token by token, without padding.
    each = []
    for i in range(6):
        text = ids[i : i + 1, ids[i] >= 0]
        logits = model.compute_logits(model.encode_for_generation(features[i : i + 1], text)[1])[0]
        logp = logits.log_softmax(-1)
        each += [
            -(1 - smoothing) * logp[t, text[0, t + 1]] - smoothing * logp[t].mean() for t in range(text.shape[1] - 1)
        ]
    torch.testing.assert_close(found["itg"], torch.stack(each).mean() * 6, rtol=1e-4, atol=1e-4)
    assert (
        made.count_loss_terms(make_batch(made)) == dict.fromkeys(("itc", "itm", "itg"), 6)
        and made.count_flops(make_batch(made)) > 0
    )


def test_equal_names_are_never_negatives(monkeypatch):
    made, seen = make_task(), []
    monkeypatch.setattr(
        made, "_matching_loss", lambda features, ids, picture, text: seen.append((picture, text)) or ids.sum()
    )
    for _ in range(20):
        made(make_batch(made))
    for drawn in (torch.stack(column) for column in zip(*seen, strict=True)):
        assert drawn.shape == (20, 6) and (drawn >= 0).all()
        assert not SAME[torch.arange(6).expand(20, -1), drawn].any()
        assert len(drawn[:, 0].unique()) > 1  # different at another time
    same = made.collate([SceneSample("named", 0), SceneSample("named", 2)])  # two dogs: no negative pair
    made(same)
    assert seen[-1][0].tolist() == seen[-1][1].tolist() == [-1, -1]


def test_without_negatives_only_true_pairs_are_matched():
    made = make_task()
    dogs = made.collate([SceneSample("named", 0), SceneSample("named", 2)])
    given = made._make_batch(dogs)
    features = made.model.forward_features(given.pixels)
    wanted = F.cross_entropy(made.model.compute_match_logits(features, given.caption_ids), torch.tensor([1, 1])) * 2
    torch.testing.assert_close(made(dogs)["itm"], wanted)


def test_mixed_batches_reach_all_trainable_parameters():
    made = make_task([make_named_source(), make_scene_source()])
    made.model.train()
    for p in made.model.tower.parameters():
        p.requires_grad_(False)
    found = made(
        made.collate([*(SceneSample("named", i) for i in range(3)), *(SceneSample("scenes", i) for i in range(3))])
    )
    sum(found.values()).backward()
    for name, p in made.model.named_parameters():
        assert (p.grad is None) == name.startswith("tower."), name


@pytest.mark.slow
def test_overfits_six_images():
    """The contrastive loss falls to its label-smoothing minimum, and the matcher classifies all pairs correctly."""
    made = make_task()
    torch.manual_seed(0)
    made.model = TextQFormer(CONFIG).train()
    optim = torch.optim.AdamW(made.model.parameters(), lr=3e-3)
    for _ in range(240):
        found = {name: loss / 6 for name, loss in made(make_batch(made)).items()}
        optim.zero_grad()
        sum(found.values()).backward()
        optim.step()
    target = SAME / SAME.sum(1, keepdim=True) * 0.9 + 0.1 / 6
    floor = -(target * target.log()).sum(1).mean()
    assert floor <= found["itc"] < floor + 0.02 and found["itm"] < 0.05
    given, model = made._make_batch(make_batch(made)), made.model.eval()
    pictures, texts = (index.flatten() for index in torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"))
    belongs = model.compute_match_logits(
        model.forward_features(given.pixels)[pictures], given.caption_ids[texts]
    ).argmax(1)
    assert torch.equal(belongs.view(6, 6).bool(), SAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": CONFIG.replace(decoder_start_token_id=None)}, "dec"),
        ({"config": CONFIG.replace(log_scale=None)}, "scale"),
        ({"config": CONFIG.replace(decoder_start_token_id=40)}, "decoder_start_token_id = 40"),
        ({"config": CONFIG.replace(context_length=3)}, "set model.config.context"),
        ({"label_smoothing": 1.0}, "smoothing"),
        ({"weights": {"itx": 1.0}}, "itc, itm, itg"),
        ({"weights": {"itm": -1.0}}, ">= 0"),
    ],
)
def test_invalid_arguments_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        make_task(**change)


# ---- many processes ---------------------------------------------------------------------------------------------


def gradients(made: QFormerTask, given, everywhere: dict[str, int]) -> dict[str, float]:
    found = made(given)
    (found["itc"] / everywhere["itc"] + found["itm"] / everywhere["itm"]).backward()
    return {name: loss.item() for name, loss in found.items()}


def save_summed_gradients(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.tasks.qformer_task.sample_hard_negatives", pick_likeliest_negatives)
        made = make_task()
        made.model.train()
        given = made.collate([[SceneSample("named", i) for i in share] for share in ((0, 1, 2, 3), (4, 5))][get_rank()])
        found = gradients(made, given, distributed.sum_over_ranks(made.count_loss_terms(given)))
    found, grads = distributed.sum_over_ranks(found), []
    for p in made.model.parameters():
        grads.append(torch.zeros_like(p) if p.grad is None else p.grad)
        torch.distributed.all_reduce(grads[-1])
    if get_rank() == 0:
        torch.save({"found": found, "grads": grads}, Path(folder) / "found.pt")


@pytest.mark.slow
def test_two_processes_match_the_gradients_of_one(tmp_path, deterministic_negatives):
    """Negatives come from the other process too, with gradients to the tower."""
    run(2, save_summed_gradients, str(tmp_path))
    saved = torch.load(tmp_path / "found.pt")
    made = make_task()
    made.model.train()
    found = gradients(made, make_batch(made), made.count_loss_terms(make_batch(made)))
    for name in ("itc", "itm"):
        assert saved["found"][name] == pytest.approx(found[name], rel=1e-4)
    for p, other in zip(made.model.parameters(), saved["grads"], strict=True):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, other, rtol=1e-3, atol=1e-4)


# ---- recipes ----------------------------------------------------------------------------------------------------

RECIPE = {
    "name": "small",
    "description": "a test",
    "tokenizer": {"vocab_size": 300, "special_tokens": ["[CLS]", "[DEC]"]},
    "model": {"kind": "text-qformer", "config": CONFIG.replace(vocab_size=300).to_dict()},
    "sources": {"shown": {"kind": "named", "datasets": ["x"], "image_size": 16}},
    "stages": [
        {
            "name": "learn",
            "task": "qformer",
            "steps": 2,
            "batch_size": 4,
            "trainable": ["qformer", "embed", "positions", "text_projection", "matcher", "writer", "log_scale"],
            "mixture": {"weights": {"shown": 1.0}},
            "optim": {"lr": 1e-3},
        }
    ],
}


def test_recipe_trains_and_initialises_a_connector(tmp_path, monkeypatch):
    kept = make_named_source()
    shown = ImageCollection(kept.records, kept.pixels(torch.arange(len(kept))))
    monkeypatch.setattr("vitrail.data.named_images.load_collection", lambda *_: shown)
    made = recipe.train_recipe(recipe.Recipe.from_dict(RECIPE), tmp_path, quiet=True)
    again = hub.load(tmp_path / "final")
    assert isinstance(again, TextQFormer) and torch.equal(again.qformer.queries, made.qformer.queries)
    plain = CONFIG.qformer.replace(use_text=False, out_features=8)
    vlm = torch.nn.ModuleDict({"connector": type(made.qformer)(plain)})
    before = vlm["connector"].project.weight.clone()
    part = recipe.PretrainedPartConfig(checkpoint=str(tmp_path / "final"), part="qformer", reinitialize=("project",))
    recipe.load_pretrained_part(vlm, "connector", part)
    assert torch.equal(vlm["connector"].queries, made.qformer.queries)
    assert torch.equal(vlm["connector"].project.weight, before)  # the second stage has its own projection
    features = torch.randn(2, 9, 16)
    assert torch.equal(vlm["connector"].encode_queries(features), again.eval().qformer.encode_queries(features))
    with pytest.raises(ConfigError, match=r"model.parts.connector cannot load project.weight of shape"):
        recipe.load_pretrained_part(
            vlm, "connector", recipe.PretrainedPartConfig(checkpoint=part.checkpoint, part="qformer")
        )
    with pytest.raises(ConfigError, match="nothing"):
        recipe.load_pretrained_part(
            vlm,
            "connector",
            recipe.PretrainedPartConfig(checkpoint=part.checkpoint, part="qformer", reinitialize=("nothing",)),
        )
