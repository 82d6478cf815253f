"""What a model that looks promises whatever its parts. Agreement with the field is in tests/hub."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize, relative
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossConfig, PrefixConfig, picture_plan
from vitrail.connectors import FusedConfig, ProjectorConfig, QFormerConfig, ResamplerConfig
from vitrail.encoders.tiled import TiledViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, StreamError
from vitrail.hub import load, save, to_hf
from vitrail.models.looking import LookingVLM, LookingVLMConfig, Views
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.stream import Batch, build, pack, split, words

VOCAB, EXTRA, W = 23, 2, 12
MARK = VOCAB + 1

SEEN = BlockConfig(width=8, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=10))
TEXT = BlockConfig(width=W, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=14), norm="rms")
TILED = TiledViTConfig(layers=2, over=1, block=SEEN, image=4, patch=2, channels=1, taps=(1,))
VIT = ViTConfig(layers=2, block=SEEN, image=4, patch=2, channels=1, cls=True)


def decoder(fusion=None, **more) -> DecoderConfig:
    fusion = CrossConfig(at=(0, 2)) if fusion is None else fusion
    shape = {"vocab": VOCAB, "layers": 3, "block": TEXT, "rotary": RotaryConfig(head_dim=6), "extra": EXTRA, **more}
    return DecoderConfig(**shape, fusion=fusion)


LLAMA = LookingVLMConfig(
    tower=TILED,
    connector=ProjectorConfig(reads=16, gives=W, layers=1),
    decoder=decoder(CrossConfig(at=(1, 3), where="inserted", blind="skip")),
    mark=MARK,
    joined=True,
)
KINDS = {
    "llama": LLAMA,
    "flamingo": LookingVLMConfig(
        tower=TILED, connector=ResamplerConfig(reads=16, gives=W, latents=3, layers=1), decoder=decoder(), mark=MARK
    ),
    "idefics": LookingVLMConfig(
        tower=VIT, decoder=decoder(CrossConfig(at=(0, 1, 2), context_width=8)), mark=MARK, prefix=True
    ),
    "patches": LookingVLMConfig(
        tower=VIT,
        connector=QFormerConfig(reads=8, gives=W, width=8, heads=2, layers=1, queries=2),
        decoder=decoder(),
        mark=MARK,
        layer=-2,
    ),
}


def model(kind: str, seed: int = 0) -> LookingVLM:
    return randomize(LookingVLM(KINDS[kind]), seed, 0.3).eval()


RATIOS = [(1, 1), (2, 2), (1, 3), (2, 1), (1, 1), (4, 1)]


def pictures(kind: str, count: int) -> Views:
    generator = torch.Generator().manual_seed(count)
    if isinstance(KINDS[kind].tower, TiledViTConfig):
        pixels = torch.randn(count, 4, 1, 4, 4, generator=generator)
        return Views(pixels, [RATIOS[i % len(RATIOS)] for i in range(count)])
    return Views(torch.randn(count, 1, 4, 4, generator=generator))


def of(views: Views, some: slice) -> Views:
    return Views(views.pixels[some], views.ratios[some])


def batch(*texts: str, budget: int | None = None) -> Batch:
    """A picture stands at each ×; other letters are words."""
    streams = [build([words([MARK if c == "×" else ord(c) % VOCAB for c in text])]) for text in texts]
    return pack(streams, budget or max(map(len, texts)), trim=True)


# ---- several samples a row --------------------------------------------------------------------------------------

letters = st.text("ab×", min_size=1, max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(texts=st.lists(letters, min_size=1, max_size=4), room=st.integers(6, 14))
def test_a_sample_is_the_same_in_any_company(kind, texts, room):
    looking, counts = model(kind), [text.count("×") for text in texts]
    views, first = pictures(kind, sum(counts)), 0
    together = batch(*texts, budget=room)
    found = split(together, looking(together, views if sum(counts) else None))
    for text, count, mine in zip(texts, counts, found, strict=True):
        own = of(views, slice(first, first + count)) if count else None
        alone = looking(batch(text), own)[0]
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)
        first += count


@settings(max_examples=60)
@given(st.lists(letters, min_size=1, max_size=4), st.booleans(), st.lists(st.integers(1, 3), min_size=24, max_size=24))
def test_plans_of_packed_samples_are_those_of_each(texts, joined, counts):
    """Pictures of unequal sizes: who sees what within a sample is what it would be alone, and nothing beside it."""
    line = "".join(texts)
    marks = torch.tensor([[c == "×" for c in line]])
    segments = torch.tensor([[i for i, text in enumerate(texts) for _ in text]])
    sizes = torch.tensor(counts[: line.count("×")], dtype=torch.long)
    total = int(sizes.sum())
    found = picture_plan(marks, sizes, joined=joined, segments=segments).mask(len(line), total, marks.device)[0, 0]
    wanted, at, key = torch.zeros(len(line), total, dtype=torch.bool), 0, 0
    for text in texts:
        own = sizes[line[:at].count("×") :][: text.count("×")]
        here, held = torch.tensor([[c == "×" for c in text]]), int(own.sum())
        if held:
            plan = picture_plan(here, own, joined=joined)
            wanted[at : at + len(text), key : key + held] = plan.mask(len(text), held, here.device)[0, 0]
        at, key = at + len(text), key + held
    assert torch.equal(found, wanted)
    spread = picture_plan(marks, 1, joined=joined, segments=segments).mask(len(line), len(sizes), marks.device)[0, 0]
    assert torch.equal(found, spread.repeat_interleave(sizes, 1))


def test_order_of_the_samples_not_of_the_rows():
    """The second sample is longest and lies in the first row; its picture is still the second."""
    looking, views = model("llama"), pictures("llama", 3)
    together = batch("×a", "b×abab", "×bb", budget=6)
    assert together.segments[:, 0].tolist() != [0, 1, 2] and len(together.ids) == 2
    found = split(together, looking(together, views))
    for i, text in enumerate(["×a", "b×abab", "×bb"]):
        assert relative(found[i], looking(batch(text), of(views, slice(i, i + 1)))[0]) <= 1e-5
        other = looking(batch(text), of(views, slice((i + 1) % 3, (i + 1) % 3 + 1)))[0]
        assert relative(found[i], other) > 1e-3


def test_padding_is_no_mark():
    config = LLAMA.with_(mark=0)
    looking = randomize(LookingVLM(config)).eval()
    texts = [[0, 3, 4, 5], [2, 0]]
    packed = pack([build([words(text)]) for text in texts], 4)
    assert looking(packed, pictures("llama", 2)).isfinite().all()


# ---- who sees what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_words_see_the_pictures_before_them(kind):
    looking, views, line = model(kind), pictures(kind, 3), batch("ab×a××b")
    whole = looking(line, views)

    def moved(which: int) -> torch.Tensor:
        pixels = views.pixels.clone()
        pixels[which] += 1.0
        return (looking(line, Views(pixels, views.ratios)) - whole).abs().amax((0, 2)) > 1e-6

    assert moved(0).tolist() == [False] * 2 + [True] * 5
    assert moved(1).tolist() == [False] * 4 + [True] * 3
    assert moved(2).tolist() == [False] * 5 + [True] * 2
    direct = looking._looked(line, looking.look(views)).plan.segments[0]
    assert direct.tolist() == ([0, 0, 1, 1, 2, 2, 2] if looking.config.joined else [0, 0, 1, 1, 2, 3, 3])


def test_tiles_that_a_picture_does_not_have_are_not_looked_at():
    seen = model("llama").look(Views(torch.randn(3, 4, 1, 4, 4), [(1, 1), (2, 2), (1, 3)]))
    assert [tuple(one.shape) for one in seen] == [(n * 5, W) for n in (1, 4, 3)]
    resampled = model("flamingo").look(Views(torch.randn(2, 4, 1, 4, 4), [(1, 1), (2, 2)]))
    assert [tuple(one.shape) for one in resampled] == [(3, W)] * 2


def test_text_alone():
    """Llama's words skip the blocks; Flamingo's go through their MLPs whether or not there is a picture about."""
    line = batch("abab")
    for kind in ("llama", "idefics"):
        looking = model(kind)
        plain = looking.decoder(line.ids)
        same = relative(looking(line), plain) <= 1e-6
        assert same == (kind == "llama")


# ---- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [("ab×a×", "×××b", "ab"), ("ab", "aab")])
def test_step_by_step_equals_at_once(kind, texts):
    looking, count = model(kind), "".join(texts).count("×")
    views = pictures(kind, count) if count else None
    line, more = batch(*texts), "bababa"
    whole = batch(*(text + more for text in texts))
    wanted = split(whole, looking(whole, views))
    cache = looking.decoder.cache(len(texts))
    first = looking.decoder.logits(looking.hidden(line, views, cache=cache))
    ids = torch.tensor([[ord(c) % VOCAB for c in more]] * len(texts))
    rest = torch.cat([looking.decoder(piece, cache=cache) for piece in ids.split([1, 1, 3, 1], dim=1)], 1)
    for row, text in enumerate(texts):
        assert relative(first[row, : len(text)], wanted[row][: len(text)]) <= 1e-5
        assert relative(rest[row], wanted[row][len(text) :]) <= 1e-5


def test_a_cache_holds_one_sample_a_row():
    looking = model("llama")
    with pytest.raises(StreamError, match="one a row"):
        looking.hidden(batch("ab", "ab", budget=4), cache=looking.decoder.cache(1))


# ---- the rest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_what_takes_part(kind):
    looking = model(kind)
    looking(batch("a×b×", "×a"), pictures(kind, 3)).square().sum().backward()
    left = {name for name, p in looking.named_parameters() if p.grad is None}
    assert (
        all(name.startswith(("tower.norm_last", "tower.blocks.1.")) for name in left) if kind == "patches" else not left
    )


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_read(kind, tmp_path):
    looking, line, views = model(kind), batch("a×b"), pictures(kind, 1)
    assert LookingVLMConfig.read(KINDS[kind].plain()) == KINDS[kind]
    save(looking, tmp_path)
    assert torch.equal(load(tmp_path)(line, views), looking(line, views))


def test_marks_are_read_and_never_said():
    looking = model("llama")
    assert looking(batch("a×b"), pictures("llama", 1)).shape[-1] == VOCAB
    assert looking.decoder.embed.weight.shape == (VOCAB + EXTRA, W)


@pytest.mark.parametrize("text, count", [("a×b", 0), ("ab", 1), ("××", 1)])
def test_every_mark_has_its_picture(text, count):
    with pytest.raises(StreamError, match=rf"{count} pictures for {text.count('×')} marks"):
        model("llama")(batch(text), pictures("llama", count) if count else None)


def test_ratios_are_for_tiles():
    with pytest.raises(ImageError, match="leave them out"):
        model("idefics").look(Views(torch.randn(1, 1, 4, 4), [(1, 1)]))
    with pytest.raises(ImageError, match="0 ratios"):
        model("llama").look(Views(torch.randn(1, 4, 1, 4, 4)))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"decoder": decoder(PrefixConfig())}, "the model `vlm`"),
        ({"mark": VOCAB + EXTRA}, "none of the 25 ids"),
        ({"mark": -1}, "none of the 25 ids"),
        ({"connector": ProjectorConfig(reads=8, gives=W)}, "tower gives 16"),
        ({"connector": ProjectorConfig(reads=16, gives=8)}, "look at 12"),
        ({"connector": None}, "tower gives 16"),
        ({"connector": FusedConfig(reads=16, gives=W, vocab=VOCAB)}, "question"),
        ({"prefix": True}, "tiled tower"),
        ({"layer": 1}, "tiled tower"),
        ({"tower": VIT, "connector": ProjectorConfig(reads=8, gives=W), "layer": 5}, "no layer 5"),
    ],
)
def test_what_cannot_be_is_refused(change, why):
    with pytest.raises(ConfigError, match=why):
        LLAMA.with_(**change)


@pytest.mark.parametrize("more", [{"extra": -1}, {"extra": 2, "tied": True}])
def test_extra_ids_need_a_table_of_their_own(more):
    with pytest.raises(ConfigError, match="extra ids"):
        decoder(**more)


@pytest.mark.parametrize("kind", ["idefics", "patches"])
def test_places_begin_with_nothing_and_are_kept(kind, tmp_path):
    """With the tower's CLS and without, looked at as they are or through a connector."""
    plain, placed = model(kind), LookingVLM(KINDS[kind].with_(place=True)).eval()
    assert placed.load_state_dict(plain.state_dict(), strict=False).missing_keys == ["place.table"]
    views, asked = pictures(kind, 2), batch("a×b", "×cd")
    assert torch.equal(plain(asked, views), placed(asked, views))
    torch.nn.init.normal_(placed.place.table)
    assert not torch.allclose(plain(asked, views), placed(asked, views), atol=1e-4)
    save(placed, tmp_path)
    assert torch.equal(load(tmp_path)(asked, views), placed(asked, views))
    with pytest.raises(CheckpointError, match="learned places"):
        to_hf(placed, tmp_path / "hf")
    with pytest.raises(ConfigError, match="where its tiles lie"):
        LLAMA.with_(place=True)
