"""Florence-2: logits, gradients, generation and exports against transformers; Microsoft's layout; task prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from hub.test_llava import pictures
from hub.vlm_parity import PICTURES, check_exports, check_gradients
from vitrail.encoders import DaViT, DaViTConfig
from vitrail.errors import CheckpointError, ConfigError, StreamError, TextError
from vitrail.generate.sampling import GREEDY
from vitrail.generate.vlm_generation import generate_from_streams
from vitrail.hub import from_hf, load_tokenizer, to_hf
from vitrail.hub.florence2 import _normalize_config, _to_original_name
from vitrail.models.encoder_decoder_vlm import EncoderDecoderVLM
from vitrail.models.vision_inputs import VisionInputs
from vitrail.nn import Workload, cost
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.tokenizer_files import FLORENCE2_TOKENS
from vitrail.stream import Stream, build_stream, pack_streams, split_by_sample, text_part

BOS, EOS, IMAGE, VOCABULARY = 0, 2, 38, 41
START = [EOS, BOS]  # of an answer
SIZES: list[dict[str, Any]] = [  # odd sizes of the tower, and of the text model
    {
        "vision": {"embed_dim": [6, 10], "num_heads": [2, 5], "num_groups": [3, 1], "depths": [1, 2], "window_size": 2},
        "text": {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4},
        "image_size": 24,
    },
    {
        "vision": {"embed_dim": [4, 10], "num_heads": [1, 2], "num_groups": [2, 5], "depths": [2, 1], "window_size": 5}
        | {"qkv_bias": False, "mlp_ratio": 1.5, "max_position_embeddings": 4, "activation_function": "quick_gelu"},
        "text": {"encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 1}
        | {"scale_embedding": True, "activation_function": "relu"},
        "image_size": 32,
    },
]


def build_reference(sizes: dict[str, Any], width: int = 12) -> Any:
    """Build a random model of transformers."""
    vision = {"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]}
    text = {"vocab_size": VOCABULARY, "d_model": width, "encoder_ffn_dim": 14, "decoder_ffn_dim": 10}
    text |= {"max_position_embeddings": 70, "bos_token_id": BOS, "pad_token_id": 1, "eos_token_id": EOS}
    config = T.Florence2Config(
        text_config={"model_type": "bart", **text, **sizes["text"]},
        vision_config={**vision, **sizes["vision"], "projection_dim": width},
        image_token_id=IMAGE,
        image_size=sizes["image_size"],  # ignored by transformers
    )
    return randomize(T.Florence2ForConditionalGeneration(config).eval(), 3, 0.3)


def build_samples(ours: EncoderDecoderVLM) -> tuple[list[Stream], list[VisionInputs | None]]:
    """Build samples with no, one and several pictures, and answers of unequal lengths."""
    samples, shown = [], []
    for number, sizes in enumerate(PICTURES):
        images = ours.prepare_images(pictures(*sizes)) if sizes else None
        parts = [text_part([BOS, 5])]
        for layout in () if images is None else images.layouts:
            parts += [*ours.config.make_parts(layout), text_part([7, 8])]
        samples.append(build_stream([*parts, text_part([3, EOS, *START, 9, *range(4, 4 + number)])], ours.config.rules))
        shown.append(images)
    return samples, shown


def split_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Split the ids of a sample into prompt and answer."""
    length = int((ids == EOS).nonzero()[0]) + 1
    return ids[None, :length], ids[None, length:]


def compute_logits(ours: EncoderDecoderVLM, samples: list[Stream], shown: list[VisionInputs | None]) -> list[Tensor]:
    """Run all samples as one packed row; return the logits of the answers."""
    batch = pack_streams(samples, sum(map(len, samples)) + 3)
    given = [images for images in shown if images is not None]
    images = VisionInputs(torch.cat([one.pixels for one in given]), tuple(x for one in given for x in one.layouts))
    logits = split_by_sample(batch, ours(batch, images))
    return [row[-split_ids(sample.ids)[1].shape[1] :] for row, sample in zip(logits, samples, strict=True)]


def compute_reference(reference: Any, samples: list[Stream], shown: list[VisionInputs | None]) -> list[Tensor]:
    found = []
    for sample, images in zip(samples, shown, strict=True):
        prompt, answer = split_ids(sample.ids)
        pixels = {} if images is None else {"pixel_values": images.pixels}
        found.append(reference(input_ids=prompt, decoder_input_ids=answer, **pixels).logits[0])
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_logits_and_gradients(sizes, tmp_path):
    reference = build_reference(sizes)
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = build_samples(ours)
    logits, expected = compute_logits(ours, samples, shown), compute_reference(reference, samples, shown)
    check_gradients(ours, reference, logits, expected, tmp_path)


@pytest.mark.parametrize("sizes", SIZES)
def test_exports(sizes, tmp_path):
    check_exports(build_reference(sizes), tmp_path, _normalize_config)


@torch.no_grad()
def test_greedy_generation(tmp_path):
    """Prompts of unequal lengths in one batch generate the tokens of transformers."""
    reference = vary_tokens(build_reference(SIZES[0]))
    reference.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf").eval()
    samples, shown = build_samples(ours)
    prompts = [cut(sample, 1 + number) for number, sample in enumerate(samples)]
    given = [images for images in shown if images is not None]
    images = VisionInputs(torch.cat([one.pixels for one in given]), tuple(x for one in given for x in one.layouts))
    reference.generation_config = T.GenerationConfig(max_new_tokens=9, decoder_start_token_id=EOS, pad_token_id=1)
    outputs = generate_from_streams(ours, prompts, images, max_new_tokens=9, stop_ids=(), sampling=GREEDY)
    for prompt, own, output in zip(prompts, shown, outputs, strict=True):
        ids, start = split_ids(prompt.ids)
        pixels = {} if own is None else {"pixel_values": own.pixels}
        expected = reference.generate(input_ids=ids, decoder_input_ids=start, **pixels)[0]
        assert len(set(output.ids)) > 1
        assert output.ids == expected[start.shape[1] :].tolist()


def vary_tokens(reference: Any) -> Any:
    """Let a random model generate different tokens: norms and embeddings prefer none of them."""
    text = reference.model.language_model
    for name, parameter in text.decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(name.endswith("weight"))
    text.shared.weight.copy_(torch.nn.functional.normalize(text.shared.weight - text.shared.weight.mean(0), dim=-1))
    return reference


def cut(stream: Stream, count: int) -> Stream:
    """Remove the last tokens of a stream."""
    fields = {name: getattr(stream, name)[:-count] for name in ("ids", "kinds", "positions", "spans", "loss_mask")}
    return Stream(**fields, source=stream.source[:-count], row=stream.row[:-count], sources=stream.sources)


def write_original(reference: Any, folder: Path) -> None:
    """Write a model in Microsoft's layout, whose embedding has no row for the image token."""
    reference.save_pretrained(folder)
    table = json.loads((folder / "config.json").read_text())
    vision = table["vision_config"]
    vision |= {"model_type": "davit", "dim_embed": vision.pop("embed_dim")}
    vision["image_pos_embed"] = {"type": "learned_abs_2d", "max_pos_embeddings": vision.pop("max_position_embeddings")}
    table["text_config"] |= {"vocab_size": IMAGE}
    del table["image_token_id"], table["text_config"]["model_type"]
    (folder / "config.json").write_text(json.dumps(table))
    tensors = load_file(folder / "model.safetensors")
    renamed = {_to_original_name(name): tensor for name, tensor in tensors.items()}
    renamed["image_projection"] = renamed["image_projection"].T.contiguous()
    shared = renamed["language_model.model.shared.weight"][:IMAGE].clone()
    renamed["language_model.model.shared.weight"] = shared
    renamed |= {
        "language_model.lm_head.weight": shared.clone(),
        "language_model.final_logits_bias": torch.zeros(1, IMAGE),
    }
    save_file(renamed, folder / "model.safetensors")


def test_original_layout(tmp_path):
    """Microsoft's files load to the same weights, and a zero row for the image token; the export adds that row."""
    reference = build_reference(SIZES[0])
    with torch.no_grad():
        reference.model.language_model.shared.weight[IMAGE:] = 0
    reference.save_pretrained(tmp_path / "hf")
    write_original(reference, tmp_path / "original")
    expected, ours = from_hf(tmp_path / "hf").state_dict(), from_hf(tmp_path / "original")
    embed = expected.pop("decoder.embed.weight")
    assert torch.equal(ours.decoder.embed.weight, embed[: IMAGE + 1])
    state = ours.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    names = [_to_original_name(name) for name in load_file(tmp_path / "hf/model.safetensors")]
    assert "vision_tower.blocks.0.0.spatial_block.window_attn.fn.qkv.weight" in names
    assert "vision_tower.blocks.1.0.channel_block.ffn.fn.net.fc1.weight" in names
    assert "vision_tower.convs.1.proj.weight" in names and "image_pos_embed.row_embeddings.weight" in names
    to_hf(ours, tmp_path / "export")
    back = T.Florence2ForConditionalGeneration.from_pretrained(tmp_path / "export")
    assert back.config.text_config.vocab_size == IMAGE + 1 and back.config.image_token_id == IMAGE


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"vision_config": {"dim_embed": [4, 8], "image_feature_source": ["last_frame"]}}, "image_feature_source"),
        ({"text_config": {"normalize_before": True}}, "norms before"),
        ({"text_config": {"model_type": "mbart"}}, "mbart"),
        ({"text_config": {"d_model": 96}}, "projection_dim"),
        ({"vision_config": {"num_groups": [3, 4, 5, 6]}}, "does not divide"),
        ({"vision_config": {"depths": [1, 1]}}, "blocks is"),
        ({"vision_config": {"patch_padding": [0, 1, 1, 1]}}, "another grid"),
    ],
)
def test_bad_configs(keys, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "florence2", **keys}))
    with pytest.raises((CheckpointError, ConfigError), match=problem) as error:
        from_hf(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_bad_inputs(tmp_path):
    build_reference(SIZES[0]).save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    with pytest.raises(StreamError, match="nothing to start with"):
        generate_from_streams(ours, [build_stream([text_part([BOS, 5, EOS])])], max_new_tokens=1)
    with pytest.raises(StreamError, match="71 tokens"):
        ours(pack_streams([build_stream([text_part([5] * 70 + START)])], 72))
    with pytest.raises(ConfigError, match="rows of one shape"):
        ours.make_row_template([], 4)
    with pytest.raises(ConfigError, match="end_of_prompt_id"):
        ours.config.replace(end_of_prompt_id=VOCABULARY)


# ---- prompts ----------------------------------------------------------------------------------------------------


def render(text: str, images: int = 1) -> str:
    content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
    return ChatTemplate.from_preset("florence2").render([{"role": "user", "content": content}])


def test_task_prompts():
    """Prompts are those of transformers' processor, with the start of the answer."""
    # The processor builds its tables before it looks at the files that it lacks here.
    reference = T.Florence2Processor.__new__(T.Florence2Processor)
    with pytest.raises(AttributeError):
        reference.__init__(None, None)
    tasks = [*reference.task_prompts_without_inputs]
    tasks += [f"{task}a cat<loc_1>" for task in reference.task_prompts_with_input]
    assert len(tasks) == 15
    for task in [*tasks, "What is this?"]:
        (prompt,) = reference._construct_prompts(task)
        assert render(task) == f"<image><s>{prompt}</s></s><s>"
    with pytest.raises(TextError, match="takes no further text"):
        render("<OD>a cat")
    with pytest.raises(TextError, match="takes one image"):
        render("<OD>", images=2)


def test_tokens_of_places(tmp_path):
    """The tokenizer of Microsoft's files gets the tokens of places, which texts may contain, and the image token."""
    tokenizer = Tokenizer.train(["a cat"], 300, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], eos=None)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config = {"model_type": "florence2", "vision_config": {"dim_embed": [4, 8]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token_id, loaded.pad_token_id, loaded.eos_token_id) == (0, 1, 2)
    size = tokenizer.vocab_size
    assert [loaded.token_to_id(token) for token in FLORENCE2_TOKENS] == [*range(size, size + 1024)]
    assert loaded.token_to_id("<image>") == size + 1024 and "<image>" in loaded.special_tokens
    ids = loaded.encode("a<loc_7><loc_999>", literal=True)
    assert ids[-2:] == [loaded.token_to_id("<loc_7>"), loaded.token_to_id("<loc_999>")]
    assert loaded.decode(ids, skip_special_tokens=True) == "a<loc_7><loc_999>"
    loaded.save(tmp_path)
    assert load_tokenizer(tmp_path).decode(ids, skip_special_tokens=True) == "a<loc_7><loc_999>"


def test_cost_of_the_tower():
    config = DaViTConfig(
        image_size=48,
        widths=(8, 12),
        blocks=(1, 2),
        heads=(2, 3),
        groups=(4, 2),
        kernel_sizes=(7, 3),
        strides=(4, 2),
        paddings=(3, 1),
        norm_first=(False, True),
        window_size=5,
    )
    tower = DaViT(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tower(torch.randn(3, 3, 48, 48))
    assert cost.count_flops(tower, Workload.full_attention(36, 3)) == counter.get_total_flops()
