"""Phi-4-multimodal matches transformers on random checkpoints of unusual shapes, with and without its vision LoRA."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioEmbedding

import vitrail
from helpers import randomize, relative
from hub.vlm_parity import PICTURES, VALUES, build_samples, check_parity, compute_logits
from vitrail.errors import VitrailError
from vitrail.generate.sampling import GREEDY
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.hub import from_hf, load, phi4_multimodal, save, to_hf
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm import VLM
from vitrail.pipelines.chat import append_ids
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.hd_tiles import DynamicHDPolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import pack_streams
from vitrail.training.lora import LoRAConfig, add_lora, merge_lora

TEXT = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 8192, "pad_token_id": 0}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER |= {"image_size": 24, "patch_size": 4, "crop_size": 24, "image_token_id": 98}
AUDIO = {"hidden_size": 8, "num_attention_heads": 2, "num_blocks": 1, "intermediate_size": 6, "input_size": 8}
AUDIO |= {"ext_pw_out_channel": 8, "depthwise_separable_out_channel": 8, "nemo_conv_channels": 4, "audio_token_id": 97}
ROPE = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 1e4}
ROPE |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0]}
LORA = {"r": 3, "lora_alpha": 5, "dp": 0.0}


def phi4(vision=(), **more):
    config = T.Phi4MultimodalConfig(
        **TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} | more,
        vision_config=TOWER | dict(vision),
        audio_config=AUDIO,
    )
    # With sdpa, the tower of transformers is causal if no patch is masked. The published one never is.
    return randomize(T.Phi4MultimodalForCausalLM._from_config(config, attn_implementation="eager").eval(), spread=0.1)


CASES = {
    "plain": phi4,
    "partial rotary, long samples, tied, window": lambda: phi4(
        rope_parameters=ROPE, original_max_position_embeddings=60, tie_word_embeddings=True, sliding_window=33
    ),
    "last layer, other tiles": lambda: phi4({"feature_layer": -1, "image_size": 40, "crop_size": 40, "patch_size": 5}),
    "an image without padding": lambda: phi4({"image_size": 10, "crop_size": 10, "patch_size": 5}),
    "first layer, no grouped queries": lambda: phi4({"feature_layer": 1, "patch_size": 6}, num_key_value_heads=4),
}


def inputs(vision, sample, mask, views):
    """Pad the views of each image, and mask the patches in padding, as the processor does."""
    if not views:
        return {}
    side, patch = vision.image_size, vision.patch_size
    [sizes] = [sizes for sizes in PICTURES if len(sizes) == len(views)]
    canvases, masks = [], []
    for size in sizes:
        placement = DynamicHDPolicy(tile_size=side, patch_size=patch).place(*size)
        canvas = [count * side for count in placement.tiles]
        covered = torch.ones([length // patch for length in canvas])
        for axis, (length, resized) in enumerate(zip(canvas, placement.resized_size, strict=True)):
            if cut := math.floor((length - resized) / patch):
                covered.narrow(axis, len(covered.movedim(axis, 0)) - cut, cut).zero_()
        n = side // patch
        tiles = covered.unfold(0, n, n).unfold(1, n, n).flatten(0, 1)
        canvases.append(canvas)
        masks.append(torch.cat([torch.ones(1, n, n), tiles]))
    return {
        "image_pixel_values": pad_sequence([view.roll(1, 0) for view in views], batch_first=True),  # the whole first
        "image_sizes": torch.tensor(canvases),
        "image_attention_mask": pad_sequence(masks, batch_first=True, padding_value=1.0),
    }


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case, tmp_path):
    reference = CASES[case]()
    check_parity(reference, tmp_path, partial(inputs, reference.config.vision_config))


# ---- the published layout, with a vision LoRA --------------------------------------------------------------------


class AdaptedLinear(nn.Module):
    """A linear layer with low-rank updates, named as in the published files. Samples with images use `vision`."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base_layer, self.is_active = layer, False
        names = ("vision", "speech")
        self.lora_A = nn.ModuleDict({name: nn.Linear(layer.in_features, LORA["r"], bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(LORA["r"], layer.out_features, bias=False) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        update = self.lora_B["vision"](self.lora_A["vision"](x)) * LORA["lora_alpha"] / LORA["r"]
        return self.base_layer(x) + update * self.is_active


def adapt(reference):
    for layer in reference.model.layers:
        for part, names in ((layer.self_attn, ("qkv_proj", "o_proj")), (layer.mlp, ("gate_up_proj", "down_proj"))):
            for name in names:
                setattr(part, name, AdaptedLinear(getattr(part, name)))
    return randomize(reference, spread=0.1)


def adapted_inputs(reference, sample, mask, views):
    for module in reference.modules():
        if isinstance(module, AdaptedLinear):
            module.is_active = bool(views)
    return inputs(reference.config.vision_config, sample, mask, views)


OLD_NAMES = {
    "img_projection_up": "img_projection.0",
    "img_projection_down": "img_projection.2",
    "global_img_feature_extensor": "glb_GN",
    "sub_img_feature_extensor": "sub_GN",
}


def write_published(reference, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    config = reference.config
    about = {**TEXT, "model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "image_token_id": 98}
    about |= {"num_key_value_heads": config.num_key_value_heads, "sliding_window": config.sliding_window}
    about |= {"tie_word_embeddings": config.tie_word_embeddings, "vision_lora": LORA, "speech_lora": LORA}
    about["original_max_position_embeddings"] = config.original_max_position_embeddings
    about["img_processor"] = {"layer_idx": config.vision_config.feature_layer}
    if config.rope_parameters["rope_type"] == "longrope":
        about["rope_scaling"] = {"type": "longrope"} | {key: ROPE[key] for key in ("short_factor", "long_factor")}
        about["partial_rotary_factor"] = ROPE["partial_rotary_factor"]
    (folder / "config.json").write_text(json.dumps(about))
    tensors = {}
    for name, tensor in reference.state_dict().items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def use_tower(monkeypatch):
    """The published config does not list the tower."""

    def use(reference):
        monkeypatch.setattr(phi4_multimodal, "TOWER", reference.config.vision_config.to_dict())
        return reference

    return use


@pytest.mark.parametrize("case", CASES)
def test_published_layout_matches_transformers_with_lora(case, tmp_path, use_tower):
    reference = use_tower(adapt(CASES[case]()))
    ours = check_parity(reference, tmp_path, partial(adapted_inputs, reference), write_published)
    assert ours.config.decoder.fusion.rank == LORA["r"]


SPEECH = ("audio_embed", ".speech.")


@pytest.mark.parametrize("case", CASES)
def test_published_layout_round_trips(case, tmp_path, use_tower):
    """All tensors but those of speech are written bit by bit."""
    write_published(use_tower(adapt(CASES[case]())), tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back", family="phi4mm")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("hf", "back"))
    kept = {name for name in before if not any(word in name for word in SPEECH)}
    assert kept == set(after) and all(torch.equal(before[name], after[name]) for name in kept)
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "phi4mm"
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config


# ---- the layout of transformers ----------------------------------------------------------------------------------


def open_export(folder: Path):
    """Open an export in transformers. Speech is not exported, so its tower is given small sizes."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"audio_config": AUDIO}))
    return T.Phi4MultimodalForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("case", CASES)
def test_transformers_layout_round_trips(case, tmp_path):
    reference = CASES[case]()
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf")
    to_hf(ours, tmp_path / "back")
    about = json.loads((tmp_path / "back/config.json").read_text())
    assert about["architectures"] == ["Phi4MultimodalForCausalLM"]
    assert normalize_llava_config(from_hf(tmp_path / "back").config) == normalize_llava_config(ours.config)
    a, b = reference.state_dict(), open_export(tmp_path / "back").state_dict()
    kept = {name for name in a if "audio_embed" not in name}
    assert kept == {name for name in b if "audio_embed" not in name}
    assert all(torch.equal(a[name], b[name]) for name in kept)
    save(ours, tmp_path / "own")
    assert load(tmp_path / "own").config == ours.config


def test_adapter_folder_round_trips(tmp_path, use_tower):
    """The vision LoRA of the published layout becomes a folder in the format of peft, and back."""
    reference = use_tower(adapt(phi4()))
    write_published(reference, tmp_path / "published")
    published = from_hf(tmp_path / "published")
    to_hf(published, tmp_path / "transformers")
    assert json.loads((tmp_path / "transformers/config.json").read_text())["model_type"] == "phi4_multimodal"
    again = from_hf(tmp_path / "transformers")
    assert again.config.decoder.fusion == published.config.decoder.fusion
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in published.state_dict().items())
    to_hf(again, tmp_path / "back", family="phi4mm")
    before, after = (SafetensorsWeights(tmp_path / name) for name in ("published", "back"))
    assert all(torch.equal(before[name], after[name]) for name in after)

    adapter = tmp_path / "transformers" / "vision-lora"
    about, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        SafetensorsWeights(adapter / "adapter_model.safetensors"),
    )
    assert (about["r"], about["lora_alpha"], about["peft_type"]) == (LORA["r"], LORA["lora_alpha"], "LORA")
    name = "model.layers.1.mlp.gate_up_proj.lora_A"
    assert torch.equal(tensors[f"base_model.model.{name}.weight"], reference.state_dict()[f"{name}.vision.weight"])
    to_hf(from_hf(tmp_path / "transformers"), tmp_path / "again")
    plain = from_hf(tmp_path / "transformers")
    plain.decoder.add_fusion(phi4_multimodal.PrefixFusionConfig())
    plain.config = plain.config.replace(decoder=plain.decoder.config)
    to_hf(plain, tmp_path / "transformers")
    assert not any(adapter.iterdir())


# ---- prompts -----------------------------------------------------------------------------------------------------

RELEASED_TEMPLATE = (  # for texts with numbered images
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
ASK = "What is shown in this image?"


def test_prompts_are_those_published(tmp_path, use_tower):
    """Images are written without a text around them. The released template is that of texts, and ours renders them."""
    specials = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext10|>", "<|endoftext11|>"]
    words = Tokenizer.train([ASK] * 3, 400, special_tokens=specials, eos="<|endoftext|>")
    reference = adapt(phi4(vocab_size=words.vocab_size))
    write_published(use_tower(reference), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": words.vocab_size}))
    words.chat_template = RELEASED_TEMPLATE
    words.save(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"dynamic_hd": 4}))
    pipeline = vitrail.load(tmp_path, device="cpu")
    config, image_id = pipeline.model.config, words.token_to_id("<|endoftext10|>")
    assert (config.rules.fill_id, config.policy.max_tiles) == (image_id, 4)
    images = [Image.new("RGB", (90, 30)), Image.new("RGB", (30, 70))]
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": ASK}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    found = words.decode(pipeline.build_prompt(messages).stream.ids.tolist())
    tokens = "<|endoftext10|>" * sum(config.policy.layout(image.height, image.width).num_tokens for image in images)
    assert found == f"<|system|>Be brief.<|end|><|user|>{tokens}{ASK}<|end|><|assistant|>"
    assert words.token_to_id("<|end|>") in pipeline.stop_ids
    assert isinstance(pipeline.chat(messages, max_new_tokens=3), str)

    talk = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "A cat."}]
    released = ChatTemplate.from_tokenizer(words)
    for more in ({}, {"add_generation_prompt": True}):
        ours = pipeline.chat_template.render(talk, **more)
        assert ours == released.render(talk, **more, eos_token="<|endoftext|>")
    with torch.no_grad():  # no image: no adapter
        ids = pipeline.build_prompt(talk[:1]).stream.ids[None]
        adapted_inputs(reference, None, None, [])
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": list(pipeline.stop_ids)}
        answer = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    assert pipeline.ask([], ASK, max_new_tokens=4) == words.decode(answer, skip_special_tokens=True).strip()


# ---- image LoRA --------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path, use_tower):
    reference = use_tower(adapt(phi4()))
    write_published(reference, tmp_path / "hf")
    return from_hf(tmp_path / "hf").eval()


@torch.no_grad()
def test_generation_keeps_the_adapter_of_its_prompt(model):
    """Rows with and without images in one batch give the tokens of a model without cache."""
    for p in model.decoder.fusion.parameters():
        p.mul_(5)  # so that tokens without the adapter differ
    samples, shown = build_samples(model)
    given = [images for images in shown if images is not None]
    images = VisionInputs(torch.cat([one.pixels for one in given]), tuple(x for one in given for x in one.layouts))
    found = generate_from_streams(model, samples, images, max_new_tokens=5, sampling=GREEDY)
    for sample, own, text in zip(samples, shown, found, strict=True):
        longer = append_ids(sample, text.ids[:-1])
        logits = model(pack_streams([longer], len(longer)), own)[0]
        assert logits[len(sample) - 1 :].argmax(-1).tolist() == text.ids


def test_trained_lora_is_merged_beside_the_image_lora(model, tmp_path):
    """LoRA layers of a training compose with the image LoRA, for images and for text, and merge into the weights."""
    samples, shown = build_samples(model)
    before = compute_logits(model, samples, shown)
    add_lora(model, LoRAConfig(rank=2, alpha=4.0, target_modules=("decoder.blocks.*.qkv", "*.up", "tower.*.down")))
    for a, b in zip(before, compute_logits(model, samples, shown), strict=True):
        assert relative(a, b) <= VALUES
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora." in name and ".fusion." not in name for name in trained)
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if name in trained:
            p.data.normal_(std=0.2)
    tuned = compute_logits(model, samples, shown)
    assert all(relative(a, b) > 10 * VALUES for a, b in zip(before, tuned, strict=True))
    merge_lora(model)
    to_hf(model, tmp_path / "merged", family="phi4mm")
    for a, b in zip(tuned, compute_logits(from_hf(tmp_path / "merged").eval(), samples, shown), strict=True):
        assert relative(a, b) <= VALUES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_lora": None}, "'vision_lora' is missing"),
        ({"vision_lora": {**LORA, "dp": 0.1}}, "vision_lora.dp is 0.1"),
        ({"vision_lora": {**LORA, "layer": "layers.*qkv_proj"}}, "vision_lora.layer is 'layers"),
        ({"vision_lora": {"r": 3}}, "'lora_alpha' is missing"),
        ({"vision_lora": {**LORA, "r": 0}}, "rank 0"),
        ({"vision_lora": {**LORA, "r": 4}}, "lora_A.vision.weight' has shape"),
        ({"embd_layer": {"image_embd_layer": {"hd_transform_order": "glb_sub"}}}, "hd_transform_order is 'glb_sub'"),
        ({"embd_layer": {"image_embd_layer": {"crop_size": 448}}}, "crop_size is 448"),
        ({"num_hidden_layers": 4}, "no tensor 'model.layers.3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ],
)
def test_unsupported_settings_raise(change, message, tmp_path, use_tower):
    write_published(use_tower(adapt(phi4())), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(VitrailError, match=message):
        from_hf(tmp_path)


def test_parameters_are_those_published():
    """Our model, the speech tower and the speech LoRA together have the parameters of the index of the files."""
    about = json.loads(Path(__file__).with_name("released_configs.json").read_text())
    about = about["microsoft/Phi-4-multimodal-instruct"]["config.json"]
    config, audio = phi4_multimodal.PHI4MM.from_hf_config(about), T.Phi4MultimodalAudioConfig(bias_max_distance=500)
    with torch.device("meta"):
        ours = VLM(config)
        tower = Phi4MultimodalAudioEmbedding(T.Phi4MultimodalConfig(audio_config=audio, vision_config={}))
    lora = (
        sum(p.numel() for p in ours.decoder.fusion.parameters())
        * about["speech_lora"]["r"]
        // about["vision_lora"]["r"]
    )
    total = sum(x.numel() for x in [*ours.parameters(), *tower.parameters(), *tower.buffers()]) + lora
    assert 2 * total == 11_148_920_768


def test_tower_without_even_rows_is_refused():
    config = T.Phi4MultimodalConfig(
        **TEXT, vision_config=TOWER | {"image_size": 20, "crop_size": 20}, audio_config=AUDIO
    )
    with pytest.raises(VitrailError, match="5"):
        phi4_multimodal.PHI4_MULTIMODAL.from_hf_config(json.loads(config.to_json_string()))
