"""Text of a VLM with a cache equals that of full passes and of transformers."""

import pytest
import torch
from PIL import Image

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig, DeepStackConfig, PrefixFusionConfig, VisualExpertConfig
from vitrail.connectors import MergerConfig, ProjectorConfig
from vitrail.encoders import PackedViTConfig, ViTConfig
from vitrail.errors import ConfigError, StreamError
from vitrail.generate import GREEDY, SamplingConfig
from vitrail.generate.cuda_graph_decode import CUDAGraphDecodeStep, can_capture
from vitrail.generate.vlm_generation import VLMStepper, generate_from_streams, stream_tokens_from_streams
from vitrail.hub import from_hf
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.overlapping_tiles import OverlapPolicy
from vitrail.processing.resolution_policies import NaivePolicy, NativePolicy
from vitrail.stream import StreamRules, build_stream, pack_streams, text_part
from vitrail.stream.packing import pad_streams

VOCAB = 61
TOWER = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=24))
BLOCK = BlockConfig(
    width=32, attention=AttentionConfig(heads=2, kv_heads=1), mlp=GatedMLPConfig(intermediate_size=40), norm="rms"
)
PLAIN = PrefixFusionConfig()
FLAT = RotaryConfig(head_dim=16)
MROPE = RotaryConfig(head_dim=16, layout="mrope", sections=(2, 3, 3))


def decoder(rotary=FLAT, fusion=PLAIN) -> DecoderConfig:
    return DecoderConfig(vocab_size=VOCAB, layers=3, block=BLOCK, rotary=rotary, context_length=200, fusion=fusion)


def llava_like(fusion=PLAIN, **more) -> VLMConfig:
    return VLMConfig(
        tower=ViTConfig(image_size=28, patch_size=7, layers=2, block=TOWER),
        decoder=decoder(fusion=fusion),
        **(
            {
                "connector": ProjectorConfig(in_features=16, out_features=32),
                "policy": NaivePolicy(image_size=28, patch_size=7),
            }
            | more
        ),
    )


def qwen_like(rule: str, taps: tuple[int, ...] = ()) -> VLMConfig:
    merger = MergerConfig(in_features=16, out_features=32, order="blocks")
    return VLMConfig(
        tower=PackedViTConfig(layers=2, block=TOWER, patch_size=4, feature_layers=taps),
        connector=merger,
        stack=merger if taps else None,
        decoder=decoder(MROPE, DeepStackConfig(layer_indices=(0,)) if taps else PLAIN),
        policy=NativePolicy(patch_size=4, min_pixels=64, max_pixels=1600),
        rules=StreamRules(positions=rule, vocab_size=VOCAB, fill_id=60),
    )


CASES = {
    "llava": llava_like(),
    "next": llava_like(policy=AnyResPolicy(tile_size=28, patch_size=7, grids=((1, 2), (2, 1))), newline=True),
    "both ways": llava_like(rules=StreamRules(bidirectional=("image",))),
    "expert": llava_like(VisualExpertConfig()),
    "added": llava_like(
        merge="add",
        vision_feature_layer=(-1, 0),
        connector=ProjectorConfig(in_features=32, out_features=32),
        rules=StreamRules(fill_id=7),
    ),
    "overlap": llava_like(
        merge="add",
        padding_embedding=True,
        policy=OverlapPolicy(tile_size=28, patch_size=7, merge_size=1, max_tiles=3, margins=(1, 1)),
        vision_token_ids={"image_newline": 6},
    ),
    "qwen2": qwen_like("qwen2-vl"),
    "qwen3": qwen_like("qwen3-vl", taps=(0,)),
}


def pictures(count: int = 3) -> list[Image.Image]:
    sizes, generator = [(40, 90), (33, 31), (70, 28)], torch.Generator().manual_seed(0)
    made = [torch.randint(0, 256, (h, w, 3), generator=generator, dtype=torch.uint8) for h, w in sizes[:count]]
    return [Image.fromarray(one.numpy()) for one in made]


def laid_out(model: VLM):
    """Rows of two, one and no pictures, the last ending in one; and the pictures of all."""
    shown = model.prepare_images(pictures())
    a, b, c = (model.config.make_part(shape) for shape in shown.layouts)
    parts = [[text_part([1, 5]), a, text_part([7]), b, text_part([9, 2])], [text_part([3, 4, 5])], [text_part([8]), c]]
    return parts, shown


@torch.no_grad()
def by_whole_passes(model: VLM, parts, shown, count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        one = build_stream([*parts, text_part(output)], model.config.rules)
        output.append(int(model(pack_streams([one], len(one)), shown)[0, -1].argmax()))
    return output


@pytest.mark.parametrize("name", CASES)
def test_equal_to_whole_passes(name):
    model = randomize(VLM(CASES[name]), 3, 0.3).eval()
    parts, shown = laid_out(model)
    streams = [build_stream(one, model.config.rules) for one in parts]
    found = generate_from_streams(model, streams, shown, max_new_tokens=9, sampling=GREEDY)
    images = pictures()
    alone = [model.prepare_images(images[:2]), None, model.prepare_images(images[2:])]
    for row in range(3):
        assert found[row].ids == by_whole_passes(model, parts[row], alone[row], 9)
    pieces = list(stream_tokens_from_streams(model, streams, shown, max_new_tokens=9, sampling=GREEDY))
    assert [[piece.id for piece in pieces if piece.row == row] for row in range(3)] == [one.ids for one in found]


@pytest.mark.parametrize("name", ["llava", "qwen3"])
@torch.no_grad()
def test_logits_of_a_step_are_those_of_the_whole(name):
    model = randomize(VLM(CASES[name]), 4, 0.3).eval()
    parts, shown = laid_out(model)
    streams = [build_stream(one, model.config.rules) for one in parts]
    steps = VLMStepper(model, streams, shown, None)
    found = [steps.prefill(torch.empty(0), torch.tensor([len(one) for one in streams]))]
    found += [steps.step(torch.tensor([id, id + 1, id + 2])) for id in (11, 30)]
    longer = [
        build_stream([*one, text_part([11 + row, 30 + row])], model.config.rules) for row, one in enumerate(parts)
    ]
    batch = pad_streams(longer)
    wanted = model.decoder.compute_logits(model.forward_hidden(batch, shown, cache=model.decoder.make_cache(3)))
    for row, one in enumerate(streams):
        for k in range(3):
            assert relative(found[k][row], wanted[row, len(one) - 1 + k]) < 1e-5
    if name == "qwen3":  # pictures take less room in positions than in tokens
        assert int(steps.next_position[0]) - 2 < len(streams[0])


def test_one_sample_a_row():
    model = VLM(CASES["llava"])
    streams = [build_stream(one, model.config.rules) for one in laid_out(model)[0]]
    batch = pad_streams(streams)
    assert len(batch.ids) == 3 > len(pack_streams(streams, max(map(len, streams))).ids)  # which lays two side by side
    assert batch.lengths == tuple(map(len, streams))
    for row, one in enumerate(streams):
        assert torch.equal(batch.ids[row, : len(one)], one.ids) and (batch.segments[row, len(one) :] == -1).all()


def test_a_row_does_not_depend_on_its_neighbours():
    model = randomize(VLM(CASES["qwen2"]), 5, 0.3).eval()
    parts, shown = laid_out(model)
    streams = [build_stream(one, model.config.rules) for one in parts]
    how = {"max_new_tokens": 8, "sampling": SamplingConfig(seed=3)}
    last = generate_from_streams(
        model, streams[2:], model.prepare_images(pictures()[2:]), max_new_tokens=8, sampling=SamplingConfig(seed=5)
    )[0]
    assert generate_from_streams(model, streams, shown, **how)[2].ids == last.ids


def test_what_cannot_be_is_refused():
    model = VLM(CASES["llava"]).eval()
    parts, shown = laid_out(model)
    streams = [build_stream(one, model.config.rules) for one in parts]
    with pytest.raises(StreamError, match="got none"):
        generate_from_streams(model, streams, None, max_new_tokens=2)
    with pytest.raises(ConfigError, match="prompts for"):
        generate_from_streams(model, streams, shown, max_new_tokens=2, guidance_scale=2.0, negative_prompts=[[1]])
    with pytest.raises(ConfigError, match="exceed the context length 200"):
        generate_from_streams(model, streams, shown, max_new_tokens=190)


def test_what_cannot_be_captured_is_refused():
    cross = Decoder(decoder(fusion=CrossAttentionFusionConfig(layer_indices=(1,))))
    for model, message in ((cross, "image features of cross-attention"), (Decoder(decoder()), "CUDA")):
        assert not can_capture(model, 1, 64)
        with pytest.raises(ConfigError, match=message):
            CUDAGraphDecodeStep(model, model.make_cache(1, 64))


# ---- against transformers ---------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
PARTED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
CLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
BLOCKS = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 24, "intermediate_size": 32}
BLOCKS |= {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 48}


def llava(transformers):
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=98,
    )
    return transformers.LlavaForConditionalGeneration(config), lambda shown: {}


def qwen(transformers):
    config = transformers.Qwen2_5_VLConfig(
        vision_config=BLOCKS, text_config=TEXT | PARTED, image_token_id=98, tie_word_embeddings=False
    )

    def grids(shown):
        return {"image_grid_thw": torch.tensor([[grid.t, grid.h, grid.w] for grid in shown.layouts])}

    return transformers.Qwen2_5_VLForConditionalGeneration(config), grids


@pytest.mark.parametrize("make", [llava, qwen])
def test_greedy_text_is_that_of_transformers(make, tmp_path):
    import transformers

    theirs, about = make(transformers)
    randomize(theirs.eval(), 1, 0.25).save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    parts, shown = laid_out(ours)
    # A prompt that ends in a picture is left out: there `generate` counts on from each axis of the last token, which is
    # neither what transformers' own whole passes do nor ours.
    streams = [build_stream([*one, text_part([6])], ours.config.rules) for one in parts]
    found = generate_from_streams(ours, streams, shown, max_new_tokens=20, sampling=GREEDY)
    longest = max(map(len, streams))
    ids, there, seen = torch.zeros(3, 3, longest, dtype=torch.long)
    for row, one in enumerate(streams):  # transformers goes on from rows that end together
        at = slice(longest - len(one), None)
        ids[row, at], there[row, at], seen[row, at] = one.ids, 1, (one.kinds == 1).long()
    more = about(shown)
    wanted = theirs.generate(
        input_ids=ids,
        attention_mask=there,
        pixel_values=shown.pixels,
        **(more | {"mm_token_type_ids": seen} if more else {}),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert [one.ids for one in found] == wanted[:, longest:].tolist()
    assert len({id for one in found for id in one.ids}) > 6
