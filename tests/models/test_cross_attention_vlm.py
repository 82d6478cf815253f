"""Cross-attention VLM, independent of its parts. Agreement with released models is tested in tests/hub."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize, relative
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig, PrefixFusionConfig, make_image_plan
from vitrail.connectors import FusedQueryConfig, ProjectorConfig, QFormerConfig, ResamplerConfig
from vitrail.encoders.tiled_vit import TiledViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, StreamError
from vitrail.hub import load, save, to_hf
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, CrossAttentionVLMConfig, ImageViews
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.stream import PackedBatch, build_stream, pack_streams, split_by_sample, text_part

VOCAB, EXTRA, W = 23, 2, 12
MARK = VOCAB + 1

SEEN = BlockConfig(width=8, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=10))
TEXT = BlockConfig(width=W, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=14), norm="rms")
TILED = TiledViTConfig(
    layers=2, global_layers=1, block=SEEN, image_size=4, patch_size=2, channels=1, feature_layers=(1,)
)
VIT = ViTConfig(layers=2, block=SEEN, image_size=4, patch_size=2, channels=1, cls_token=True)


def decoder(fusion=None, **more) -> DecoderConfig:
    fusion = CrossAttentionFusionConfig(layer_indices=(0, 2)) if fusion is None else fusion
    shape = {
        "vocab_size": VOCAB,
        "layers": 3,
        "block": TEXT,
        "rotary": RotaryConfig(head_dim=6),
        "extra_embeddings": EXTRA,
        **more,
    }
    return DecoderConfig(**shape, fusion=fusion)


LLAMA = CrossAttentionVLMConfig(
    tower=TILED,
    connector=ProjectorConfig(in_features=16, out_features=W, layers=1),
    decoder=decoder(CrossAttentionFusionConfig(layer_indices=(1, 3), placement="inserted", without_image="skip")),
    image_token_id=MARK,
    join_adjacent=True,
)
KINDS = {
    "llama": LLAMA,
    "flamingo": CrossAttentionVLMConfig(
        tower=TILED,
        connector=ResamplerConfig(in_features=16, out_features=W, num_latents=3, layers=1),
        decoder=decoder(),
        image_token_id=MARK,
    ),
    "idefics": CrossAttentionVLMConfig(
        tower=VIT,
        decoder=decoder(CrossAttentionFusionConfig(layer_indices=(0, 1, 2), context_width=8)),
        image_token_id=MARK,
        keep_prefix_tokens=True,
    ),
    "patches": CrossAttentionVLMConfig(
        tower=VIT,
        connector=QFormerConfig(in_features=8, out_features=W, width=8, heads=2, layers=1, num_queries=2),
        decoder=decoder(),
        image_token_id=MARK,
        vision_feature_layer=-2,
    ),
}


def model(kind: str, seed: int = 0) -> CrossAttentionVLM:
    return randomize(CrossAttentionVLM(KINDS[kind]), seed, 0.3).eval()


RATIOS = [(1, 1), (2, 2), (1, 3), (2, 1), (1, 1), (4, 1)]


def pictures(kind: str, count: int) -> ImageViews:
    generator = torch.Generator().manual_seed(count)
    if isinstance(KINDS[kind].tower, TiledViTConfig):
        pixels = torch.randn(count, 4, 1, 4, 4, generator=generator)
        return ImageViews(pixels, [RATIOS[i % len(RATIOS)] for i in range(count)])
    return ImageViews(torch.randn(count, 1, 4, 4, generator=generator))


def of(views: ImageViews, some: slice) -> ImageViews:
    return ImageViews(views.pixels[some], views.aspect_ratios[some])


def batch(*texts: str, budget: int | None = None) -> PackedBatch:
    """Parse text rows with an image at each ×."""
    streams = [build_stream([text_part([MARK if c == "×" else ord(c) % VOCAB for c in text])]) for text in texts]
    return pack_streams(streams, budget or max(map(len, texts)), trim=True)


# ---- several samples a row --------------------------------------------------------------------------------------

letters = st.text("ab×", min_size=1, max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(texts=st.lists(letters, min_size=1, max_size=4), room=st.integers(6, 14))
def test_packed_samples_equal_single_samples(kind, texts, room):
    cross_vlm, counts = model(kind), [text.count("×") for text in texts]
    views, first = pictures(kind, sum(counts)), 0
    together = batch(*texts, budget=room)
    found = split_by_sample(together, cross_vlm(together, views if sum(counts) else None))
    for text, count, mine in zip(texts, counts, found, strict=True):
        own = of(views, slice(first, first + count)) if count else None
        alone = cross_vlm(batch(text), own)[0]
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)
        first += count


@settings(max_examples=60)
@given(st.lists(letters, min_size=1, max_size=4), st.booleans(), st.lists(st.integers(1, 3), min_size=24, max_size=24))
def test_plans_of_packed_samples(texts, joined, counts):
    """Images of unequal sizes: packed samples have the same attention as single samples."""
    line = "".join(texts)
    marks = torch.tensor([[c == "×" for c in line]])
    segments = torch.tensor([[i for i, text in enumerate(texts) for _ in text]])
    sizes = torch.tensor(counts[: line.count("×")], dtype=torch.long)
    total = int(sizes.sum())
    found = make_image_plan(marks, sizes, join_adjacent=joined, segments=segments).mask(len(line), total, marks.device)[
        0, 0
    ]
    wanted, at, key = torch.zeros(len(line), total, dtype=torch.bool), 0, 0
    for text in texts:
        own = sizes[line[:at].count("×") :][: text.count("×")]
        here, held = torch.tensor([[c == "×" for c in text]]), int(own.sum())
        if held:
            plan = make_image_plan(here, own, join_adjacent=joined)
            wanted[at : at + len(text), key : key + held] = plan.mask(len(text), held, here.device)[0, 0]
        at, key = at + len(text), key + held
    assert torch.equal(found, wanted)
    spread = make_image_plan(marks, 1, join_adjacent=joined, segments=segments).mask(
        len(line), len(sizes), marks.device
    )[0, 0]
    assert torch.equal(found, spread.repeat_interleave(sizes, 1))


def test_images_are_in_sample_order():
    """The second sample is longest and lies in the first row; its image is still the second."""
    cross_vlm, views = model("llama"), pictures("llama", 3)
    together = batch("×a", "b×abab", "×bb", budget=6)
    assert together.segments[:, 0].tolist() != [0, 1, 2] and len(together.ids) == 2
    found = split_by_sample(together, cross_vlm(together, views))
    for i, text in enumerate(["×a", "b×abab", "×bb"]):
        assert relative(found[i], cross_vlm(batch(text), of(views, slice(i, i + 1)))[0]) <= 1e-5
        other = cross_vlm(batch(text), of(views, slice((i + 1) % 3, (i + 1) % 3 + 1)))[0]
        assert relative(found[i], other) > 1e-3


def test_padding_is_not_an_image_token():
    config = LLAMA.replace(image_token_id=0)
    cross_vlm = randomize(CrossAttentionVLM(config)).eval()
    texts = [[0, 3, 4, 5], [2, 0]]
    packed = pack_streams([build_stream([text_part(text)]) for text in texts], 4)
    assert cross_vlm(packed, pictures("llama", 2)).isfinite().all()


# ---- who sees what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_text_attends_to_earlier_images(kind):
    cross_vlm, views, line = model(kind), pictures(kind, 3), batch("ab×a××b")
    whole = cross_vlm(line, views)

    def moved(which: int) -> torch.Tensor:
        pixels = views.pixels.clone()
        pixels[which] += 1.0
        return (cross_vlm(line, ImageViews(pixels, views.aspect_ratios)) - whole).abs().amax((0, 2)) > 1e-6

    assert moved(0).tolist() == [False] * 2 + [True] * 5
    assert moved(1).tolist() == [False] * 4 + [True] * 3
    assert moved(2).tolist() == [False] * 5 + [True] * 2
    direct = cross_vlm._build_cross_attention_inputs(line, cross_vlm.encode_images(views)).plan.segments[0]
    assert direct.tolist() == ([0, 0, 1, 1, 2, 2, 2] if cross_vlm.config.join_adjacent else [0, 0, 1, 1, 2, 3, 3])


def test_empty_tiles_are_masked():
    seen = model("llama").encode_images(ImageViews(torch.randn(3, 4, 1, 4, 4), [(1, 1), (2, 2), (1, 3)]))
    assert [tuple(one.shape) for one in seen] == [(n * 5, W) for n in (1, 4, 3)]
    resampled = model("flamingo").encode_images(ImageViews(torch.randn(2, 4, 1, 4, 4), [(1, 1), (2, 2)]))
    assert [tuple(one.shape) for one in resampled] == [(3, W)] * 2


def test_text_only():
    """Llama's text skips the blocks; Flamingo's passes through their MLPs, with or without images."""
    line = batch("abab")
    for kind in ("llama", "idefics"):
        cross_vlm = model(kind)
        plain = cross_vlm.decoder(line.ids)
        same = relative(cross_vlm(line), plain) <= 1e-6
        assert same == (kind == "llama")


# ---- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [("ab×a×", "×××b", "ab"), ("ab", "aab")])
def test_cached_decoding_equals_full_pass(kind, texts):
    cross_vlm, count = model(kind), "".join(texts).count("×")
    views = pictures(kind, count) if count else None
    line, more = batch(*texts), "bababa"
    whole = batch(*(text + more for text in texts))
    wanted = split_by_sample(whole, cross_vlm(whole, views))
    cache = cross_vlm.decoder.make_cache(len(texts))
    first = cross_vlm.decoder.compute_logits(cross_vlm.forward_hidden(line, views, cache=cache))
    ids = torch.tensor([[ord(c) % VOCAB for c in more]] * len(texts))
    rest = torch.cat([cross_vlm.decoder(piece, cache=cache) for piece in ids.split([1, 1, 3, 1], dim=1)], 1)
    for row, text in enumerate(texts):
        assert relative(first[row, : len(text)], wanted[row][: len(text)]) <= 1e-5
        assert relative(rest[row], wanted[row][len(text) :]) <= 1e-5


def test_cache_needs_one_sample_per_row():
    cross_vlm = model("llama")
    with pytest.raises(StreamError, match="one sample per row"):
        cross_vlm.forward_hidden(batch("ab", "ab", budget=4), cache=cross_vlm.decoder.make_cache(1))


# ---- the rest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    cross_vlm = model(kind)
    cross_vlm(batch("a×b×", "×a"), pictures(kind, 3)).square().sum().backward()
    left = {name for name, p in cross_vlm.named_parameters() if p.grad is None}
    assert (
        all(name.startswith(("tower.norm_last", "tower.blocks.1.")) for name in left) if kind == "patches" else not left
    )


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load(kind, tmp_path):
    cross_vlm, line, views = model(kind), batch("a×b"), pictures(kind, 1)
    assert CrossAttentionVLMConfig.from_dict(KINDS[kind].to_dict()) == KINDS[kind]
    save(cross_vlm, tmp_path)
    assert torch.equal(load(tmp_path)(line, views), cross_vlm(line, views))


def test_image_tokens_have_no_logits():
    cross_vlm = model("llama")
    assert cross_vlm(batch("a×b"), pictures("llama", 1)).shape[-1] == VOCAB
    assert cross_vlm.decoder.embed.weight.shape == (VOCAB + EXTRA, W)


@pytest.mark.parametrize("text, count", [("a×b", 0), ("ab", 1), ("××", 1)])
def test_number_of_images_must_match(text, count):
    with pytest.raises(StreamError, match=rf"{count} images, but {text.count('×')} image tokens"):
        model("llama")(batch(text), pictures("llama", count) if count else None)


def test_aspect_ratios_need_tiles():
    with pytest.raises(ImageError, match="leave aspect_ratios out"):
        model("idefics").encode_images(ImageViews(torch.randn(1, 1, 4, 4), [(1, 1)]))
    with pytest.raises(ImageError, match="0 aspect ratios"):
        model("llama").encode_images(ImageViews(torch.randn(1, 4, 1, 4, 4)))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"decoder": decoder(PrefixFusionConfig())}, "not cross-attention"),
        ({"image_token_id": VOCAB + EXTRA}, "embeds 25 ids"),
        ({"image_token_id": -1}, "embeds 25 ids"),
        ({"connector": ProjectorConfig(in_features=8, out_features=W)}, "tower 16"),
        ({"connector": ProjectorConfig(in_features=16, out_features=8)}, "cross-attention 12"),
        ({"connector": None}, "tower 16"),
        ({"connector": FusedQueryConfig(in_features=16, out_features=W, vocab_size=VOCAB)}, "fused query connector"),
        ({"keep_prefix_tokens": True}, "tiled tower"),
        ({"vision_feature_layer": 1}, "tiled tower"),
        (
            {"tower": VIT, "connector": ProjectorConfig(in_features=8, out_features=W), "vision_feature_layer": 5},
            "no layer 5",
        ),
    ],
)
def test_invalid_configs_raise(change, why):
    with pytest.raises(ConfigError, match=why):
        LLAMA.replace(**change)


@pytest.mark.parametrize("more", [{"extra_embeddings": -1}, {"extra_embeddings": 2, "tie_word_embeddings": True}])
def test_extra_embeddings_need_untied_embeddings(more):
    with pytest.raises(ConfigError, match="extra_embeddings"):
        decoder(**more)


@pytest.mark.parametrize("kind", ["idefics", "patches"])
def test_position_embedding_starts_at_zero_and_is_saved(kind, tmp_path):
    """With and without CLS, and with and without a connector."""
    plain, placed = model(kind), CrossAttentionVLM(KINDS[kind].replace(position_embedding=True)).eval()
    assert placed.load_state_dict(plain.state_dict(), strict=False).missing_keys == ["position_embedding.table"]
    views, asked = pictures(kind, 2), batch("a×b", "×cd")
    assert torch.equal(plain(asked, views), placed(asked, views))
    torch.nn.init.normal_(placed.position_embedding.table)
    assert not torch.allclose(plain(asked, views), placed(asked, views), atol=1e-4)
    save(placed, tmp_path)
    assert torch.equal(load(tmp_path)(asked, views), placed(asked, views))
    with pytest.raises(CheckpointError, match="position embeddings"):
        to_hf(placed, tmp_path / "hf")
    with pytest.raises(ConfigError, match="own position embedding"):
        LLAMA.replace(position_embedding=True)
