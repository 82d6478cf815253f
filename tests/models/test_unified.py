"""One decoder that reads and draws: who sees whom, where tokens stand, and what codes cost."""

import pytest
import torch

from vitrail.backbones.decoder import DecoderConfig
from vitrail.codecs.codec import CodecConfig
from vitrail.codecs.quantizers import BSQ, FSQ, IBQ, VQ, Continuous, ResidualVQ, SimVQ
from vitrail.codecs.vit import ViTPairConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.unified import Unified, UnifiedConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig

BLOCK = BlockConfig(width=32, attention=AttentionConfig(heads=2, qk_norm="rms"), mlp=GatedConfig(hidden=48), norm="rms")
TOWER = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=16))
MROPE = RotaryConfig(16, layout="mrope", sections=(4, 2, 2))


def codec(quantizer=None, side=12) -> CodecConfig:
    quantizer = quantizer or FSQ.Config(levels=(3, 4))
    width = BSQ(quantizer).width if isinstance(quantizer, BSQ.Config) else len(getattr(quantizer, "levels", (0, 0)))
    net = ViTPairConfig(
        encoder=ViTConfig(image=side, patch=4, layers=1, block=TOWER),
        decoder=ViTConfig(image=side // 4, patch=1, channels=width, layers=1, block=TOWER),
    )
    return CodecConfig(net=net, quantizer=quantizer, out_of="none")


def made(order="raster", groups=2, rotary=MROPE, quantizer=None, side=12, **more) -> Unified:
    torch.manual_seed(0)
    decoder = DecoderConfig(vocab=50, layers=2, block=BLOCK, rotary=rotary)
    config = UnifiedConfig(decoder=decoder, codec=codec(quantizer, side), groups=groups, order=order, **more)
    model = Unified(config).eval()
    with torch.no_grad():
        for p in model.head.parameters():
            p.normal_(std=0.2)
        model.place.table.normal_(std=0.5)
    return model


def some(model, B=2, n=4):
    h, w = model.grid
    return torch.randint(0, 50, (B, n)), torch.randint(0, model.codec.sizes[0], (B, h, w))


@pytest.mark.parametrize("rotary", [MROPE, RotaryConfig(16)])
def test_words_alone_are_the_decoder_s(rotary):
    model = made(rotary=rotary)
    ids, _ = some(model, n=7)
    with torch.no_grad():
        torch.testing.assert_close(model(model.words(ids)), model.decoder.hidden(ids))


def test_a_text_decoder_stays_what_it_was():
    """Rotary positions of three axes that agree are those of one."""
    text, model = made(rotary=RotaryConfig(16)).decoder, made(rotary=MROPE)
    with torch.no_grad():
        for p in text.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    model.decoder.load_state_dict(text.state_dict())
    ids = torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(model.words(ids)), text.hidden(ids))


def test_padding_changes_nothing():
    model = made("masked")
    ids, codes = some(model, n=5)
    with torch.no_grad():
        for count in range(6):
            short = model.words(ids[:, :count])
            long = model.words(ids, torch.tensor([count, count]))
            alone, padded = (model.lay(words, model.drawn(codes)) for words in (short, long))
            a, b = model.hidden(alone), model.hidden(padded)
            torch.testing.assert_close(b[:, 5:], a[:, count:])
            assert torch.equal(padded.positions[:, 5:], alone.positions[:, count:])


def test_unequal_prompts_do_not_touch():
    model = made()
    ids, codes = some(model, n=5)
    counts = torch.tensor([2, 4])
    with torch.no_grad():
        both = model(model.words(ids, counts), model.drawn(codes))
        for row, count in enumerate(counts):
            one = model(model.words(ids[row : row + 1, :count]), model.drawn(codes[row : row + 1]))
            torch.testing.assert_close(both[row, 5:], one[0, count:])


def sees(model, pieces, at, of):
    """Whether the state at one place depends on the input at another."""
    laid = model.lay(*pieces)
    x = laid.x.detach().requires_grad_()
    model.hidden(laid._replace(x=x))[0, at].sum().backward()
    return bool(x.grad[0, of].abs().sum() > 0)


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_who_sees_whom(order):
    model = made(order)
    ids, codes = some(model, B=1)
    seen, _ = model.look(torch.rand(1, 3, 12, 12) * 2 - 1)
    drawing = [model.words(ids), model.drawn(codes)]  # 4 words, the mark, 9 codes
    assert sees(model, drawing, 6, 2) and not sees(model, drawing, 2, 6)
    assert sees(model, drawing, 9, 5) and sees(model, drawing, 5, 9) == (order == "masked")
    reading = [model.shown(seen), model.words(ids)]  # the mark, 9 codes, 4 words
    assert sees(model, reading, 1, 9) and sees(model, reading, 12, 3) and not sees(model, reading, 3, 12)
    assert not sees(model, reading, 10, 11)
    seen_by = model.lay(*reading).plan.mask(14, 14, ids.device)[0, 0, :10]
    assert model.lay(*reading).plan.lead == 10 and seen_by[:, :10].all() and not seen_by[:, 10:].any()
    assert model.lay(*drawing).plan.lead == 0 == model.lay(model.words(ids), *reading).plan.lead


def test_what_is_not_asked_for_changes_nothing():
    model = made()
    ids, _ = some(model)
    laid = model.lay(model.shown(model.look(torch.rand(2, 3, 12, 12) * 2 - 1)[0]), model.words(ids))
    found = []
    for states in (model.hidden(laid)[:, laid.ends[0] :], model.hidden(laid, laid.ends[0])):
        weights = [*model.decoder.blocks.parameters(), model.marks.weight]
        found.append([states, *torch.autograd.grad(states.square().sum(), weights, retain_graph=True)])
    assert found[0][0].shape[1] == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_places_by_rows_and_columns():
    model = made(side=8)
    ids, codes = some(model, B=1, n=2)
    where = model.lay(model.words(ids), model.drawn(codes), model.words(ids)).positions[0].tolist()
    corner = [[3, 3, 3], [3, 3, 4], [3, 4, 3], [3, 4, 4]]
    assert where == [[0, 0, 0], [1, 1, 1], [2, 2, 2], *corner, [5, 5, 5], [6, 6, 6]]
    flat = made(side=8, rotary=RotaryConfig(16)).lay(model.words(ids), model.drawn(codes)).positions
    assert flat[0].tolist() == list(range(7))


@pytest.mark.parametrize(("quantizer", "groups"), [(None, 1), (None, 2), (BSQ.Config(bits=6), 3)])
def test_codes_have_a_distribution(quantizer, groups):
    """The chances of all ids add up to one, and each is the product over its groups."""
    model = made(groups=groups, quantizer=quantizer)
    every = torch.arange(model.codec.sizes[0])
    state = torch.randn(1, 32).expand(len(every), -1)
    with torch.no_grad():
        chance = (-model.code_losses(state, every)).exp()
        torch.testing.assert_close(chance.sum(), torch.tensor(1.0))
        parts = model.parts(every)
        product = torch.ones(len(every))
        for g in range(groups):
            said = model.head.logits(state, parts[:, :g]).softmax(-1)
            product *= said.gather(1, parts[:, g, None])[:, 0]
        torch.testing.assert_close(chance, product)
        assert torch.equal(model.join(parts), every)
        more = model.code_losses(state, every, z=0.1) - model.code_losses(state, every)
        first = model.head.logits(state, parts[:, :0]).logsumexp(-1)
        assert (more >= 0.1 * first.square() - 1e-4).all()


def test_states_that_say_the_codes():
    for order in ("raster", "masked"):
        model = made(order)
        ids, codes = some(model)
        laid = model.lay(model.words(ids), model.drawn(codes))
        hidden = model.hidden(laid)
        said = model.drawing_states(laid, hidden)
        first = 4 if order == "raster" else 5
        assert torch.equal(said, hidden[:, first : first + 9])


def test_hidden_codes_do_not_matter():
    model = made("masked")
    ids, codes = some(model)
    hidden = torch.rand(codes.shape) < 0.5
    other = torch.where(hidden, (codes + 1) % 12, codes)
    with torch.no_grad():
        a, b = (model(model.words(ids), model.drawn(c, hidden)) for c in (codes, other))
    assert torch.equal(a, b)


def test_what_is_looked_at_is_the_codec_s():
    pixels = torch.rand(2, 3, 12, 12) * 2 - 1
    for sees_ in ("codes", "features"):
        model = made(sees=sees_)
        seen, ids = model.look(pixels)
        found = model.codec.encode(pixels)
        assert torch.equal(ids, found.ids)
        assert torch.equal(seen, found.codes if sees_ == "codes" else model.codec.features(pixels))
        torch.testing.assert_close(model.pixels(ids), model.codec.reconstruct(pixels))
        assert model.shown(seen).x.shape == (2, 10, 32)


def test_a_token_knows_its_own_place():
    """Of a picture that is one colour all over, tokens differ by their place alone, which rotation does not tell."""
    model = made()
    ids = torch.full((1, 3, 3), 5)
    shown = model.drawn(ids).x[0, 1:]
    torch.testing.assert_close(shown - shown[:1], model.place.table - model.place.table[:1])
    torch.testing.assert_close(model.token(ids.flatten(), torch.arange(9), (3, 3)), shown)
    assert not Unified(model.config).place.table.any()  # a fresh one learns them from nothing


@pytest.mark.parametrize("quantizer", [Continuous.Config(dim=2), ResidualVQ.Config(codes=8, dim=2, layers=2)])
def test_codes_without_one_id_are_refused(quantizer):
    with pytest.raises(ConfigError, match="and one is drawn"):
        made(quantizer=quantizer, groups=1)


def test_gradients_reach_all_but_the_codec():
    model = made("masked", sees="features").train()
    ids, codes = some(model)
    seen, _ = model.look(torch.rand(2, 3, 12, 12) * 2 - 1)
    laid = model.lay(model.words(ids), model.drawn(codes, torch.rand(codes.shape) < 0.5))
    loss = model.code_losses(model.drawing_states(laid, model.hidden(laid)), codes.flatten(1)).sum()
    loss = loss + model.decoder.logits(model(model.shown(seen), model.words(ids))).sum()
    loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == name.startswith("codec."), name


@pytest.mark.parametrize(
    "quantizer",
    [
        VQ.Config(codes=8, dim=2, start=0, revive=0.5),
        VQ.Config(codes=8, dim=2, learn="gradient"),
        SimVQ.Config(codes=8, dim=2),
        IBQ.Config(codes=8, dim=2),
    ],
)
def test_no_codebook_learns(quantizer):
    """Neither by a gradient nor by running means, in training and whatever a stage trains."""
    model = made(quantizer=quantizer, groups=1).train()
    before = {name: t.clone() for name, t in model.codec.state_dict().items()}
    ids, _ = some(model)
    _, codes = model.look(torch.rand(2, 3, 12, 12) * 2 - 1)
    laid = model.lay(model.words(ids), model.drawn(codes))
    model.code_losses(model.drawing_states(laid, model.hidden(laid)), codes.flatten(1)).sum().backward()
    assert all(p.grad is None for p in model.codec.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.codec.state_dict().items())


def test_a_codebook_s_codes_are_read_as_they_lie():
    """Equal vectors are equal to the model, whatever their ids."""
    model = made(quantizer=VQ.Config(codes=8, dim=2, start=0), groups=1)
    with torch.no_grad():
        model.codec.quantizer.codebook[5] = model.codec.quantizer.codebook[2]
        ids = torch.randint(0, 50, (1, 2))
        a, b = (model(model.words(ids), model.drawn(torch.full((1, 3, 3), i))) for i in (2, 5))
    assert torch.equal(a, b)
