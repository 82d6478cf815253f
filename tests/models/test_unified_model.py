"""Unified model: attention, positions, and losses of codes."""

import pytest
import torch

from vitrail.backbones.decoder import DecoderConfig
from vitrail.codecs.codec import CodecConfig
from vitrail.codecs.quantizers import BSQ, FSQ, IBQ, VQ, IdentityQuantizer, ResidualVQ, SimVQ
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.unified_model import UnifiedConfig, UnifiedModel
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig

BLOCK = BlockConfig(
    width=32, attention=AttentionConfig(heads=2, qk_norm="rms"), mlp=GatedMLPConfig(intermediate_size=48), norm="rms"
)
TOWER = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=16))
MROPE = RotaryConfig(16, layout="mrope", sections=(4, 2, 2))


def codec(quantizer=None, side=12) -> CodecConfig:
    quantizer = quantizer or FSQ.Config(levels=(3, 4))
    width = BSQ(quantizer).width if isinstance(quantizer, BSQ.Config) else len(getattr(quantizer, "levels", (0, 0)))
    net = ViTAutoencoderConfig(
        encoder=ViTConfig(image_size=side, patch_size=4, layers=1, block=TOWER),
        decoder=ViTConfig(image_size=side // 4, patch_size=1, channels=width, layers=1, block=TOWER),
    )
    return CodecConfig(net=net, quantizer=quantizer, post_quant="none")


def made(order="raster", groups=2, rotary=MROPE, quantizer=None, side=12, **more) -> UnifiedModel:
    torch.manual_seed(0)
    decoder = DecoderConfig(vocab_size=50, layers=2, block=BLOCK, rotary=rotary)
    config = UnifiedConfig(
        decoder=decoder, codec=codec(quantizer, side), id_groups=groups, generation_order=order, **more
    )
    model = UnifiedModel(config).eval()
    with torch.no_grad():
        for p in model.head.parameters():
            p.normal_(std=0.2)
        model.position_embedding.table.normal_(std=0.5)
    return model


def some(model, B=2, n=4):
    h, w = model.grid
    return torch.randint(0, 50, (B, n)), torch.randint(0, model.codec.vocab_sizes[0], (B, h, w))


@pytest.mark.parametrize("rotary", [MROPE, RotaryConfig(16)])
def test_text_only_equals_decoder(rotary):
    model = made(rotary=rotary)
    ids, _ = some(model, n=7)
    with torch.no_grad():
        torch.testing.assert_close(model(model.make_text_piece(ids)), model.decoder.forward_hidden(ids))


def test_text_with_three_axis_positions():
    """Rotary positions with three equal axes equal those with one axis."""
    text, model = made(rotary=RotaryConfig(16)).decoder, made(rotary=MROPE)
    with torch.no_grad():
        for p in text.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    model.decoder.load_state_dict(text.state_dict())
    ids = torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(model.make_text_piece(ids)), text.forward_hidden(ids))


def test_padding_has_no_effect():
    model = made("masked")
    ids, codes = some(model, n=5)
    with torch.no_grad():
        for count in range(6):
            short = model.make_text_piece(ids[:, :count])
            long = model.make_text_piece(ids, torch.tensor([count, count]))
            alone, padded = (model.build_layout(words, model.make_output_image_piece(codes)) for words in (short, long))
            a, b = model.forward_hidden(alone), model.forward_hidden(padded)
            torch.testing.assert_close(b[:, 5:], a[:, count:])
            assert torch.equal(padded.positions[:, 5:], alone.positions[:, count:])


def test_prompts_of_unequal_length():
    model = made()
    ids, codes = some(model, n=5)
    counts = torch.tensor([2, 4])
    with torch.no_grad():
        both = model(model.make_text_piece(ids, counts), model.make_output_image_piece(codes))
        for row, count in enumerate(counts):
            one = model(
                model.make_text_piece(ids[row : row + 1, :count]), model.make_output_image_piece(codes[row : row + 1])
            )
            torch.testing.assert_close(both[row, 5:], one[0, count:])


def depends_on(model, pieces, at, of):
    """Whether the state at one position depends on the input at another."""
    laid_out = model.build_layout(*pieces)
    x = laid_out.embeds.detach().requires_grad_()
    model.forward_hidden(laid_out._replace(embeds=x))[0, at].sum().backward()
    return bool(x.grad[0, of].abs().sum() > 0)


@pytest.mark.parametrize("order", ["raster", "masked"])
def test_attention_pattern(order):
    model = made(order)
    ids, codes = some(model, B=1)
    seen, _ = model.encode_images(torch.rand(1, 3, 12, 12) * 2 - 1)
    drawing = [model.make_text_piece(ids), model.make_output_image_piece(codes)]  # 4 words, the mark, 9 codes
    assert depends_on(model, drawing, 6, 2) and not depends_on(model, drawing, 2, 6)
    assert depends_on(model, drawing, 9, 5) and depends_on(model, drawing, 5, 9) == (order == "masked")
    reading = [model.make_input_image_piece(seen), model.make_text_piece(ids)]  # the mark, 9 codes, 4 words
    assert (
        depends_on(model, reading, 1, 9) and depends_on(model, reading, 12, 3) and not depends_on(model, reading, 3, 12)
    )
    assert not depends_on(model, reading, 10, 11)
    seen_by = model.build_layout(*reading).plan.mask(14, 14, ids.device)[0, 0, :10]
    assert model.build_layout(*reading).plan.prefix_length == 10 and seen_by[:, :10].all() and not seen_by[:, 10:].any()
    assert (
        model.build_layout(*drawing).plan.prefix_length
        == 0
        == model.build_layout(model.make_text_piece(ids), *reading).plan.prefix_length
    )


def test_partial_hidden_states():
    model = made()
    ids, _ = some(model)
    laid_out = model.build_layout(
        model.make_input_image_piece(model.encode_images(torch.rand(2, 3, 12, 12) * 2 - 1)[0]),
        model.make_text_piece(ids),
    )
    found = []
    for states in (
        model.forward_hidden(laid_out)[:, laid_out.ends[0] :],
        model.forward_hidden(laid_out, laid_out.ends[0]),
    ):
        weights = [*model.decoder.blocks.parameters(), model.mark_embed.weight]
        found.append([states, *torch.autograd.grad(states.square().sum(), weights, retain_graph=True)])
    assert found[0][0].shape[1] == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_row_and_column_positions():
    model = made(side=8)
    ids, codes = some(model, B=1, n=2)
    where = (
        model.build_layout(model.make_text_piece(ids), model.make_output_image_piece(codes), model.make_text_piece(ids))
        .positions[0]
        .tolist()
    )
    corner = [[3, 3, 3], [3, 3, 4], [3, 4, 3], [3, 4, 4]]
    assert where == [[0, 0, 0], [1, 1, 1], [2, 2, 2], *corner, [5, 5, 5], [6, 6, 6]]
    flat = (
        made(side=8, rotary=RotaryConfig(16))
        .build_layout(model.make_text_piece(ids), model.make_output_image_piece(codes))
        .positions
    )
    assert flat[0].tolist() == list(range(7))


@pytest.mark.parametrize(("quantizer", "groups"), [(None, 1), (None, 2), (BSQ.Config(bits=6), 3)])
def test_code_probabilities_sum_to_one(quantizer, groups):
    """Probabilities of all ids sum to one, and each is the product over its groups."""
    model = made(groups=groups, quantizer=quantizer)
    every = torch.arange(model.codec.vocab_sizes[0])
    state = torch.randn(1, 32).expand(len(every), -1)
    with torch.no_grad():
        chance = (-model.compute_code_losses(state, every)).exp()
        torch.testing.assert_close(chance.sum(), torch.tensor(1.0))
        parts = model.split_ids(every)
        product = torch.ones(len(every))
        for g in range(groups):
            output = model.head.compute_logits(state, parts[:, :g]).softmax(-1)
            product *= output.gather(1, parts[:, g, None])[:, 0]
        torch.testing.assert_close(chance, product)
        assert torch.equal(model.join_ids(parts), every)
        more = model.compute_code_losses(state, every, z_loss=0.1) - model.compute_code_losses(state, every)
        first = model.head.compute_logits(state, parts[:, :0]).logsumexp(-1)
        assert (more >= 0.1 * first.square() - 1e-4).all()


def test_code_states():
    for order in ("raster", "masked"):
        model = made(order)
        ids, codes = some(model)
        laid_out = model.build_layout(model.make_text_piece(ids), model.make_output_image_piece(codes))
        hidden = model.forward_hidden(laid_out)
        output = model.get_code_states(laid_out, hidden)
        first = 4 if order == "raster" else 5
        assert torch.equal(output, hidden[:, first : first + 9])


def test_masked_codes_are_not_used():
    model = made("masked")
    ids, codes = some(model)
    hidden = torch.rand(codes.shape) < 0.5
    other = torch.where(hidden, (codes + 1) % 12, codes)
    with torch.no_grad():
        a, b = (model(model.make_text_piece(ids), model.make_output_image_piece(c, hidden)) for c in (codes, other))
    assert torch.equal(a, b)


def test_image_inputs_are_the_codec_s():
    pixels = torch.rand(2, 3, 12, 12) * 2 - 1
    for sees_ in ("codes", "features"):
        model = made(image_input=sees_)
        seen, ids = model.encode_images(pixels)
        found = model.codec.encode(pixels)
        assert torch.equal(ids, found.ids)
        assert torch.equal(seen, found.codes if sees_ == "codes" else model.codec.forward_features(pixels))
        torch.testing.assert_close(model.decode_pixels(ids), model.codec.reconstruct(pixels))
        assert model.make_input_image_piece(seen).embeds.shape == (2, 10, 32)


def test_tokens_have_learned_positions():
    """In an image of one colour, tokens differ only by their learned position embedding."""
    model = made()
    ids = torch.full((1, 3, 3), 5)
    shown = model.make_output_image_piece(ids).embeds[0, 1:]
    torch.testing.assert_close(shown - shown[:1], model.position_embedding.table - model.position_embedding.table[:1])
    torch.testing.assert_close(model.embed_codes(ids.flatten(), torch.arange(9), (3, 3)), shown)
    assert not UnifiedModel(model.config).position_embedding.table.any()  # a fresh one learns them from nothing


@pytest.mark.parametrize(
    "quantizer", [IdentityQuantizer.Config(dim=2), ResidualVQ.Config(codebook_size=8, dim=2, layers=2)]
)
def test_quantizers_without_one_id_raise(quantizer):
    with pytest.raises(ConfigError, match="one is generated"):
        made(quantizer=quantizer, groups=1)


def test_codec_has_no_gradients():
    model = made("masked", image_input="features").train()
    ids, codes = some(model)
    seen, _ = model.encode_images(torch.rand(2, 3, 12, 12) * 2 - 1)
    laid_out = model.build_layout(
        model.make_text_piece(ids), model.make_output_image_piece(codes, torch.rand(codes.shape) < 0.5)
    )
    loss = model.compute_code_losses(
        model.get_code_states(laid_out, model.forward_hidden(laid_out)), codes.flatten(1)
    ).sum()
    loss = (
        loss + model.decoder.compute_logits(model(model.make_input_image_piece(seen), model.make_text_piece(ids))).sum()
    )
    loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == name.startswith("codec."), name


@pytest.mark.parametrize(
    "quantizer",
    [
        VQ.Config(codebook_size=8, dim=2, kmeans_iters=0, dead_code_threshold=0.5),
        VQ.Config(codebook_size=8, dim=2, codebook_update="gradient"),
        SimVQ.Config(codebook_size=8, dim=2),
        IBQ.Config(codebook_size=8, dim=2),
    ],
)
def test_codebook_does_not_change(quantizer):
    """Neither by gradients nor by running means, in training, whatever a stage trains."""
    model = made(quantizer=quantizer, groups=1).train()
    before = {name: t.clone() for name, t in model.codec.state_dict().items()}
    ids, _ = some(model)
    _, codes = model.encode_images(torch.rand(2, 3, 12, 12) * 2 - 1)
    laid_out = model.build_layout(model.make_text_piece(ids), model.make_output_image_piece(codes))
    model.compute_code_losses(
        model.get_code_states(laid_out, model.forward_hidden(laid_out)), codes.flatten(1)
    ).sum().backward()
    assert all(p.grad is None for p in model.codec.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.codec.state_dict().items())


def test_codes_are_read_as_vectors():
    """Equal code vectors are equal inputs, whatever their ids."""
    model = made(quantizer=VQ.Config(codebook_size=8, dim=2, kmeans_iters=0), groups=1)
    with torch.no_grad():
        model.codec.quantizer.codebook[5] = model.codec.quantizer.codebook[2]
        ids = torch.randint(0, 50, (1, 2))
        a, b = (
            model(model.make_text_piece(ids), model.make_output_image_piece(torch.full((1, 3, 3), i))) for i in (2, 5)
        )
    assert torch.equal(a, b)
