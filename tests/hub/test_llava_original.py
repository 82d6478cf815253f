"""LLaVA's own layout matches transformers with the same weights, with and without a vision tower in its files."""

import json

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

from helpers import randomize, relative
from hub.test_llava import IMAGE, asked, pictures, theirs
from vitrail import hub
from vitrail.cli import checkpoint_conversion_command
from vitrail.errors import VitrailError
from vitrail.hub import llava_original
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.resolution_policies import CropPolicy, LetterboxPolicy
from vitrail.stream import pack_streams, split_by_sample

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 7}
NAME = "openai/clip-vit-large-patch14-336"
ABOUT = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava",
    **SIZE,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "rms_norm_eps": 1e-6,
    "image_aspect_ratio": "pad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "/data/clip-vit-large-patch14-336",
    "mm_use_im_start_end": False,
    "pad_token_id": IMAGE,
    "tie_word_embeddings": False,
}
GRIDS = {
    "image_aspect_ratio": "anyres",
    "mm_patch_merge_type": "spatial_unpad",
    "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84]],  # (width, height)
}


@pytest.fixture(autouse=True)
def small_tower(monkeypatch):
    monkeypatch.setitem(llava_original.TOWERS, NAME, TOWER)


def write(folder, tower: str = "inside", **more):
    """Write a random model in LLaVA's layout; the tower is inside of its files, or beside them as a CLIP model."""
    config = ABOUT | more
    text = T.LlamaConfig(**SIZE, num_key_value_heads=2, vocab_size=99)
    vision = T.CLIPVisionConfig(**TOWER)
    given = {"vision_config": vision, "text_config": text, "image_token_index": IMAGE}
    if "image_grid_pinpoints" in more:
        pinpoints = [[height, width] for width, height in more["image_grid_pinpoints"]]
        reference = T.LlavaNextForConditionalGeneration(T.LlavaNextConfig(**given, image_grid_pinpoints=pinpoints))
    else:
        reference = T.LlavaForConditionalGeneration(T.LlavaConfig(**given))
    randomize(reference.eval(), spread=0.1)
    tensors, clip = {}, {}
    for name, tensor in reference.state_dict().items():
        name = name.removeprefix("model.")
        if name.startswith("vision_tower."):
            clip[name.replace("vision_tower.", "vision_model.")] = tensor.clone()
            continue
        name = name.replace("multi_modal_projector.linear_1", "model.mm_projector.0")
        name = name.replace("multi_modal_projector.linear_2", "model.mm_projector.2")
        name = name.replace("language_model.", "model.").replace("image_newline", "model.image_newline")
        tensors[name] = tensor.clone()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tower == "inside":
        tensors |= {llava_original.TOWER_PREFIX + name: tensor for name, tensor in clip.items()}
    if tower == "beside":
        (folder / "clip-vit-large-patch14-336").mkdir()
        extra = {"logit_scale": torch.ones(1), "text_model.final_layer_norm.weight": torch.ones(3)}
        save_file(clip | extra, folder / "clip-vit-large-patch14-336" / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return reference


@pytest.mark.parametrize("tower", ["inside", "beside"])
@pytest.mark.parametrize("more", [{}, GRIDS], ids=["LLaVA-1.5", "LLaVA-NeXT"])
def test_matches_transformers(more, tower, tmp_path):
    """Logits with zero, one and several images, before and after an export to transformers' layout."""
    reference = write(tmp_path / "own", tower, **more)
    ours = hub.load(tmp_path / "own")
    assert isinstance(ours.config.policy, AnyResPolicy if more else LetterboxPolicy)
    shown = ours.prepare_images(pictures((40, 90), (33, 31), (64, 20)))
    samples = asked(ours, shown, 0, 1, 2)
    batch = pack_streams(samples, sum(map(len, samples)))
    hub.to_hf(ours, tmp_path / "export")
    exported = type(reference).from_pretrained(tmp_path / "export")
    logits = split_by_sample(batch, ours(batch, shown))
    every = zip(logits, theirs(reference, samples, shown), theirs(exported, samples, shown), strict=True)
    for mine, before, after in every:
        assert relative(mine, before) <= 1e-5 and torch.equal(before, after)


def test_tower_takes_the_dtype_of_the_decoder(tmp_path):
    write(tmp_path, "beside")
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    assert {parameter.dtype for parameter in hub.load(tmp_path).parameters()} == {torch.float16}


def test_conversion_reads_the_tower_beside(tmp_path):
    write(tmp_path / "own", "beside")
    checkpoint_conversion_command.import_checkpoint(str(tmp_path / "own"), out=tmp_path / "native")
    mine, other = hub.load(tmp_path / "own").state_dict(), hub.load(tmp_path / "native").state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def test_policies_and_projectors(tmp_path):
    write(tmp_path, image_aspect_ratio=None)
    assert isinstance(hub.load(tmp_path).config.policy, CropPolicy)
    family = llava_original.LLAVA_ORIGINAL
    for kind, layers in llava_original.PROJECTOR_LAYERS.items():
        config = family.from_hf_config(ABOUT | {"mm_projector_type": kind})
        names = {name for rule in family.tensor_rules(config) for name in rule.hf if "mm_projector" in name}
        assert len(names) == 2 * layers and ("model.mm_projector.weight" in names) == (layers == 1)
    with pytest.raises(VitrailError, match=r"possible: llava$"):
        hub.to_hf(hub.load(tmp_path), tmp_path / "out", family="LlavaLlamaForCausalLM")


def test_missing_tower_is_named(tmp_path, monkeypatch):
    write(tmp_path, "absent")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(VitrailError) as error:
        hub.load(tmp_path)
    assert NAME in str(error.value) and "no vision tower" in str(error.value)
    assert str(tmp_path / "clip-vit-large-patch14-336") in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_vision_tower": "laion/some-tower"}, "mm_vision_tower 'laion/some-tower'"),
        ({"mm_vision_tower": None}, "'mm_vision_tower' is missing"),
        ({"mm_projector_type": "qformer"}, "mm_projector_type 'qformer'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end"),
        ({"mm_vision_select_feature": "cls"}, "patch, cls_patch"),
        ({"image_aspect_ratio": "anyres", "mm_patch_merge_type": "flat"}, "spatial_unpad"),
        ({"pad_token_id": None}, "image_token_index"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path):
    write(tmp_path, **change)
    with pytest.raises(VitrailError, match=message):
        hub.load(tmp_path)
