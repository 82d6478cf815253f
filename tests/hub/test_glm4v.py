"""GLM-4.1V and GLM-4.5V match transformers on random weights of unusual shapes.

Compares values, gradients, positions, pixels, videos and exports.

transformers marks images and videos with one token, so that a sample has images or videos, not both.
"""

import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.video_utils import VideoMetadata

import vitrail
from helpers import randomize
from hub.test_qwen_vl import GRADIENTS, Sample, asked, close, gradients, shown
from hub.test_released_chat_templates import CONVERSATIONS
from hub.test_released_configs import RELEASED
from vitrail.errors import VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.checkpoint_info import read_config
from vitrail.models.vlm import VLM
from vitrail.pipelines import Video
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES
from vitrail.stream import interleave_patches, pack_streams, split_by_sample, text_part

IMAGE, START, END = 90, 92, 93
IDS = {"image_token_id": IMAGE, "video_token_id": 91, "image_start_token_id": START, "image_end_token_id": END}
IDS |= {"video_start_token_id": 94, "video_end_token_id": 95}
MODELS = {
    "glm4v": (T.Glm4vConfig, T.Glm4vForConditionalGeneration),
    "glm4v_moe": (T.Glm4vMoeConfig, T.Glm4vMoeForConditionalGeneration),
}
CASES = [(family, seed) for family in MODELS for seed in range(4)]
PLOTS = {"nothing": "", "picture": "i", "pictures": "iii", "video": "v", "videos": "vv"}
FAMILY = FAMILIES["glm4v"]
RELEASED_TEMPLATE = RELEASED["zai-org/GLM-4.1V-9B-Thinking"]["chat_template.jinja"]


def build_experts(seed: int, text: dict) -> dict:
    """Draw experts in groups; the first layers have none."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 3])
    best = draw.randint(1, groups)
    size = draw.randint(2, 4)
    return {
        "head_dim": text["hidden_size"] // text["num_attention_heads"],
        "attention_bias": draw.random() < 0.7,
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": best,
        "num_experts_per_tok": draw.randint(1, best * size),
        "n_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": draw.randint(5, 20),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "norm_topk_prob": draw.random() < 0.7,
        "first_k_dense_replace": draw.choice([0, 1]),
    }


def build_reference(family: str, seed: int):
    draw = random.Random(seed)
    heads, channels, share = draw.choice([2, 3, 4]), draw.choice([8, 12, 16]), draw.choice([0.5, 0.5, 1.0])
    slots = int(channels * share) // 2
    text = {
        "vocab_size": 97,
        "hidden_size": heads * channels,
        "intermediate_size": draw.randint(9, 40),
        "num_hidden_layers": draw.randint(2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.choice([1e4, 5e5]),
            "partial_rotary_factor": share,
            "mrope_section": [slots - 2, 1, 1],
        },
    }
    tower_heads, patch_size = draw.choice([1, 2, 3]), draw.choice([2, 3])
    vision = {
        "depth": draw.randint(2, 4),
        "num_heads": tower_heads,
        "hidden_size": tower_heads * draw.choice([4, 8, 12]),
        "hidden_act": draw.choice(["silu", "gelu"]),
        "attention_bias": draw.random() < 0.5,
        "patch_size": patch_size,
        "image_size": patch_size * draw.randint(2, 7),
        "temporal_patch_size": 2,
        "spatial_merge_size": draw.choice([2, 2, 3]),
        "out_hidden_size": text["hidden_size"],
        "intermediate_size": draw.randint(7, 50),
    }
    if family == "glm4v_moe":
        text |= build_experts(seed, text)
    config_class, model_class = MODELS[family]
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=draw.random() < 0.5, **IDS)
    config._experts_implementation = "eager"  # the grouped one needs aligned shapes
    reference = randomize(model_class(config), seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, bias in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.rand(bias.shape, generator=generator))
    return reference


def load_gradients(family, config, gradients):
    """Return the gradients under native names. The files have the matrices of each expert apart."""
    experts = {name: x for name, x in gradients.items() if ".mlp.experts." in name}
    found = {name: x for name, x in gradients.items() if name not in experts}
    for name, matrices in experts.items():
        prefix, _, kind = name.rpartition(".")
        for e, matrix in enumerate(matrices):
            if kind == "down_proj":
                found[f"{prefix}.{e}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                found |= {f"{prefix}.{e}.gate_proj.weight": gate, f"{prefix}.{e}.up_proj.weight": up}
    for rule in FAMILIES[family].tensor_rules(config):
        if all(name in found for name in rule.hf):
            yield from zip(rule.native, rule.load([found[name] for name in rule.hf]), strict=True)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(family, seed) → transformers model, the native model loaded from its folder, and the folder."""
    made = {}

    def make(family: str, seed: int):
        case = family, seed
        if case not in made:
            folder, reference = tmp_path_factory.mktemp(family), build_reference(*case)
            reference.save_pretrained(folder)
            made[case] = reference, from_hf(folder), folder
        return made[case]

    return make


class GLMSample(Sample):
    """A sample whose videos have the second of each temporal patch after it."""

    def video(self):
        frames = self.tower.temporal_patch_size * self.draw.randint(2, 4)
        self.films.append(torch.randn(frames, self.tower.channels, self.side(), self.side()))
        part = self.model.config.make_part(self.model.prepare_packed(self.films[-1:]).layouts[0])
        before = [text_part([START])] + [text_part([END, 16 + k, START]) for k in range(part.shape.t - 1)]
        return [text_part([94]), *interleave_patches(part, before), text_part([END, 17, 95])]


def build_inputs(ours, samples) -> dict:
    given = asked(ours, samples)
    given["input_ids"][given["mm_token_type_ids"] == 2] = IMAGE
    return given


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_values_and_gradients(both, plot, family, seed):
    reference, ours, _ = both(family, seed)
    sample = GLMSample(ours, PLOTS[plot], seed)
    stream = sample.stream()
    got = ours(pack_streams([stream], len(stream)), **shown(ours, [sample]))
    want = reference(**build_inputs(ours, [sample])).logits
    close(got, want)
    weights = torch.randn_like(want)
    mine, theirs = gradients(ours, (got * weights).sum()), gradients(reference, (want * weights).sum())
    wanted = dict(load_gradients(family, ours.config, theirs))
    assert wanted.keys() == mine.keys()
    for name, gradient in wanted.items():
        assert (mine[name] - gradient).abs().max() <= GRADIENTS * gradient.abs().max().clamp_min(1e-3), name
    assert plot == "nothing" or mine["tower.embed.proj.weight"].abs().max() > 0


@pytest.mark.parametrize("plots", [("i", ""), ("v", "vv"), ("ii", "i")])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_packed_matches_padded(both, plots, family, seed):
    reference, ours, _ = both(family, seed)
    samples = [GLMSample(ours, plot, 10 * seed + k) for k, plot in enumerate(plots)]
    streams = [sample.stream() for sample in samples]
    batch = pack_streams(streams, sum(map(len, streams)) + 3)
    want = reference(**build_inputs(ours, samples)).logits
    for row, got in enumerate(split_by_sample(batch, ours(batch, **shown(ours, samples)))):
        close(got, want[row, : len(got)])


@pytest.mark.parametrize("plot", ["i", "v", "vv", "ii"])
def test_positions(both, plot):
    reference, ours, _ = both("glm4v", 0)
    sample = GLMSample(ours, plot, 3)
    given = build_inputs(ours, [sample])
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    theirs, _ = reference.model.get_rope_index(**{key: given[key] for key in keys if key in given})
    assert torch.equal(sample.stream().positions, theirs[:, 0].T)


def test_images_and_videos_together(both):
    """A sample with an image and a video has the values of its parts in transformers, by features and positions."""
    reference, ours, _ = both("glm4v", 1)
    sample = GLMSample(ours, "ivi", 2)
    stream, seen = sample.stream(), shown(ours, [sample])
    given = build_inputs(ours, [sample])
    embeds = reference.get_input_embeddings()(given["input_ids"])
    features = {
        1: reference.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output,
        2: reference.get_video_features(given["pixel_values_videos"], given["video_grid_thw"]).pooler_output,
    }
    for kind, found in features.items():
        embeds[given["mm_token_type_ids"] == kind] = torch.cat(list(found))
    want = reference(inputs_embeds=embeds, position_ids=stream.positions.T[:, None]).logits
    close(ours(pack_streams([stream], len(stream)), **seen), want)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_round_trip(both, family, seed, tmp_path):
    reference, ours, folder = both(family, seed)
    budget = ours.config.replace(policy=ours.config.policy.replace(max_pixels=123_456))
    kept, ours.config = ours.config, budget
    to_hf(ours, tmp_path / "hf")
    ours.config = kept
    assert read_config(tmp_path / "hf") == budget and read_config(folder) == kept
    about = json.loads((tmp_path / "hf/config.json").read_text())
    assert about["model_type"] == family and about["architectures"] == [type(reference).__name__]
    back = type(reference).from_pretrained(tmp_path / "hf", experts_implementation="eager").eval()
    state, again = reference.state_dict(), back.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    given = build_inputs(ours, [GLMSample(ours, "ii", seed)])
    close(back(**given).logits, reference(**given).logits, 1e-6)
    unused = ["intermediate_size"] if family == "glm4v_moe" and not kept.decoder.dense_layers else []
    for key, changed in (("text_config", unused), ("vision_config", [])):
        was, now = (getattr(model.config, key).to_dict() for model in (reference, back))
        assert [name for name, value in was.items() if value is not None and now[name] != value] == changed
    save(ours, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.config == ours.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in ours.state_dict().items())


def test_flat_config(both):
    """The released file has the keys of the language model at the top, and older keys of the rotary positions."""
    _, ours, folder = both("glm4v", 1)
    about = json.loads((folder / "config.json").read_text())
    text = about.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "default", "mrope_section": rope["mrope_section"]}
    older = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")} | {"rope_scaling": scaling}
    assert FAMILY.from_hf_config({**text, **about, **older}) == ours.config


@pytest.mark.parametrize("seed", range(3))
def test_preprocessing_matches_transformers(both, seed):
    _, ours, _ = both("glm4v", seed)
    kept = ours.config
    about = {"size": {"shortest_edge": 800, "longest_edge": 6000}}
    ours.config = config = FAMILY.image_processor.apply_processor_config(kept, about)
    rng = np.random.default_rng(seed)
    sizes = [(1, 1), (3, 190), (17, 19), (61, 47), (200, 33), (28, 28), (101, 256), (2, 350)]
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    got = ours.prepare_images(images)
    ours.config = kept
    processor = Glm4vImageProcessorPil(
        **about,
        patch_size=config.tower.patch_size,
        merge_size=config.tower.spatial_merge_size,
        temporal_patch_size=config.tower.temporal_patch_size,
    )
    want = processor(images, return_tensors="pt")
    assert [[g.t, g.h, g.w] for g in got.layouts] == want["image_grid_thw"].tolist()
    assert torch.equal(got.pixels, want["pixel_values"])


def test_default_budget_is_that_of_transformers():
    config = FAMILY.from_hf_config({"partial_rotary_factor": 0.5})
    assert FAMILY.image_processor.to_processor_config(config)["size"] == Glm4vImageProcessorPil().size


# ---- videos in questions ----------------------------------------------------------------------------------------

SPECIALS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>"]
SPECIALS += ["<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"]
WORDS = ["what happens in the video? a red ball rolls 0 1 2 3 4 5 6 7 8 9"] * 3


@pytest.fixture(scope="module")
def chat_pipeline(tmp_path_factory):
    """A small model with its tokenizer and the processor file of videos, and the folder."""
    folder = tmp_path_factory.mktemp("talker")
    words = Tokenizer.train(WORDS, 330, special_tokens=SPECIALS, eos="<|endoftext|>")
    names = {"image": "image", "video": "video", "begin_of_image": "image_start", "end_of_image": "image_end"}
    names |= {"begin_of_video": "video_start", "end_of_video": "video_end"}
    ids = {f"{key}_token_id": words.token_to_id(f"<|{token}|>") for token, key in names.items()}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**size, "intermediate_size": 40, "vocab_size": words.vocab_size, "rope_parameters": rope}
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 16, "patch_size": 4, "image_size": 12}
    vision |= {"out_hidden_size": 32, "intermediate_size": 24}
    reference = T.Glm4vForConditionalGeneration(T.Glm4vConfig(text_config=text, vision_config=vision, **ids))
    randomize(reference, 4, 0.3).eval().save_pretrained(folder)
    words.save(folder)
    size = {"shortest_edge": 512, "longest_edge": 5000}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return vitrail.load(folder, device="cpu"), reference


@pytest.mark.parametrize("count, rate", [(1, 1.0), (6, 1.0), (7, 4.0), (12, 0.9)])
def test_video_prompt_and_answer_match_transformers(chat_pipeline, count, rate):
    """Only the part of the processor that writes the frames works without torchvision."""
    chat, reference = chat_pipeline
    frames = np.random.default_rng(0).integers(0, 256, (count, 24, 40, 3), dtype=np.uint8)
    video = Video(frames, timestamps=np.arange(count) / rate, fps=2.0)
    message = chat.build_message(video, "what happens?")
    stream, _, videos = chat.build_prompt([message])
    chosen = chat.model.config.resolved_video_sampling.sample_frame_indices(count, count / rate, fps=2.0)
    metadata = VideoMetadata(total_num_frames=count, fps=rate, frames_indices=chosen)
    grid = torch.tensor([[g.t, g.h, g.w] for g in videos.layouts])
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    processor = SimpleNamespace(image_token="<|image|>", video_processor=SimpleNamespace(merge_size=2))
    processor.replace_frame_token_id = partial(T.Glm4vProcessor.replace_frame_token_id, processor)
    written = T.Glm4vProcessor.replace_video_token(processor, inputs, 0)
    plain = {**message, "content": [{"type": "video"}, {"type": "text", "text": "what happens?"}]}
    text = chat.chat_template.render([plain], add_generation_prompt=True).replace("<|video|>", written)
    assert stream.ids.tolist() == chat.tokenizer.encode(text)
    made = reference.generate(
        input_ids=stream.ids[None],
        attention_mask=torch.ones_like(stream.ids)[None],
        mm_token_type_ids=stream.kinds[None],
        pixel_values_videos=videos.pixels,
        video_grid_thw=grid,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )[0, len(stream) :]
    answer = chat.tokenizer.decode(made.tolist(), skip_special_tokens=True).strip()
    assert chat.ask(video, "what happens?", max_new_tokens=8) == answer and answer


def test_preset_renders_like_the_released_template():
    released, preset = ChatTemplate(RELEASED_TEMPLATE), ChatTemplate.from_preset("glm4v")
    for messages in CONVERSATIONS.values():
        # The released template writes content of assistants as it is, so that it must be a string.
        plain = [
            {**m, "content": m["content"][0]["text"]} if m["role"] in ("assistant", "system") else m for m in messages
        ]
        assert preset.render(plain, add_generation_prompt=True) == released.render(plain, add_generation_prompt=True)


# ---- refused ----------------------------------------------------------------------------------------------------


def test_biases_of_experts_keep_their_dtype(both):
    _, ours, folder = both("glm4v_moe", 1)
    half = from_hf(folder, dtype=torch.bfloat16).state_dict()
    name = next(name for name in half if name.endswith("correction_bias"))
    assert torch.equal(half[name], ours.state_dict()[name]) and half["decoder.norm.weight"].dtype == torch.bfloat16


def test_released_shape_of_glm4v_moe():
    """GLM-4.5V has 108 billion parameters."""
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12]}
    about = {"text_config": {"head_dim": 128, "partial_rotary_factor": 0.5, "rope_scaling": rope}}
    with torch.device("meta"):
        ours = VLM(FAMILIES["glm4v_moe"].from_hf_config(about))
        reference = T.Glm4vMoeForConditionalGeneration(T.Glm4vMoeConfig(**about))
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in reference.parameters()) == 107_743_695_360
    assert [name for name in MODELS if FAMILIES[name].supports(ours.config)] == ["glm4v_moe"]


@pytest.mark.parametrize(
    "about, why",
    [
        ({"vision_config": {"out_hidden_size": 10}, "partial_rotary_factor": 0.5}, "out_hidden_size is 10"),
        ({"vision_config": {"hidden_act": "swish"}}, "hidden_act 'swish'"),
        ({"vision_config": {"rope_parameters": {"rope_type": "linear"}}}, "only 'axial'"),
        ({"text_config": {"model_type": "llama"}}, "expected: glm4v_text"),
        ({}, "sections .8, 12, 12. do not distribute 64 slots"),
        ({"rope_scaling": {"mrope_section": [8, 12, 13]}, "partial_rotary_factor": 0.5}, "sections .8, 12, 13."),
    ],
)
def test_unsupported_settings_raise(about, why):
    with pytest.raises(VitrailError, match=why):
        FAMILY.read_config(about, Path("config.json"))


def test_odd_pixel_budget_raises(both):
    with pytest.raises(VitrailError, match="multiples of 2"):
        FAMILY.image_processor.apply_processor_config(
            both("glm4v", 0)[1].config, {"size": {"shortest_edge": 801, "longest_edge": 6000}}
        )
