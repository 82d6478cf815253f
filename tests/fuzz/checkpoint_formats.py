"""Checkpoints, tokenizers and chat templates of several kinds, all tiny."""

import json
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fuzz import mutations, template_grammar
from fuzz.target import FuzzFormat, Target
from vitrail import hub
from vitrail.errors import VitrailError
from vitrail.hub.checkpoint_info import read_config
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.chat_template_presets import PRESETS
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES

TEXTS = ("The red cube 2024.", "où est\tle cube 😀 ?\n\n  don't", "a" * 300, "\u200d ﬁ ½ Ａ\u0301", "", "<|im_end|>")
HF_FAMILIES = ("llava", "llava, siglip", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl", "blip-2", "mllama")

SIZE = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {**SIZE, "image_size": 14, "patch_size": 7}
TEXT = {**SIZE, "vocab_size": 60, "max_position_embeddings": 9, "eos_token_id": 59}
SMALL_CONFIGS = {  # families with other parts than those of HF_FAMILIES
    "clip": {"vision_config": TOWER, "text_config": TEXT, "projection_dim": 10},
    "siglip": {"vision_config": TOWER, "text_config": TEXT},
    "dinov2": TOWER,
    "gemma3_text": {
        **SIZE,
        "vocab_size": 60,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "layer_types": ["full_attention"] * 2,
    },
    "AutoencoderKL": {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
}


def read_model(path: Path) -> None:
    """Read the config of a checkpoint, build its model without weights, and load it."""
    with suppress(VitrailError):
        config = read_config(path)
        config.to_dict()
    model = hub.load(path)
    for tensor in model.state_dict().values():
        tensor.float().sum()


# ---- models in the native format ------------------------------------------------------------------------------------


def make_models() -> dict[str, torch.nn.Module]:
    """Return a small model of each kind."""
    import worlds
    from hub.test_safetensors_files import CONFIG as DECODER
    from models import test_contrastive_model, test_detector, test_unified_model, test_vlm
    from vitrail.backbones.decoder import Decoder
    from vitrail.codecs.codec import Codec
    from vitrail.codecs.quantizers import VQConfig
    from vitrail.models.contrastive_model import ContrastiveModel
    from vitrail.models.detector import Detector
    from vitrail.models.vlm import VLM, VLMConfig

    return {
        "decoder": Decoder(DECODER),
        "vlm": VLM(VLMConfig(**test_vlm.WHOLE)),
        "contrastive": ContrastiveModel(test_contrastive_model.CLIP),
        "codec": Codec(test_unified_model.codec(VQConfig(codebook_size=8, dim=2))),
        "unified": test_unified_model.made(),
        "genie": worlds.genie(),
        "detector": Detector(test_detector.config()),
    }


def prepare_native(file_name: str, folder: Path) -> list[Target]:
    targets = []
    for n, (kind, model) in enumerate(make_models().items()):
        hub.save(model, folder / kind, int8=n % 2 == 1)
        targets.append(Target(kind, folder / kind / file_name, partial(read_model, folder / kind)))
    return targets


# ---- Hugging Face checkpoints ---------------------------------------------------------------------------------------


def prepare_hf(folder: Path) -> list[Target]:
    from hub import test_prepared

    models = {"decoder": make_models()["decoder"]} | {name: test_prepared.made(name) for name in HF_FAMILIES}
    for name, hf_config in SMALL_CONFIGS.items():
        family = FAMILIES[name]
        models[name] = family.model_class(family.from_hf_config({"model_type": name, **hf_config}))
    targets = []
    for name, model in models.items():
        path = folder / name.replace(", ", "-")
        hub.to_hf(model, path)
        targets.append(Target(path.name, path / "config.json", partial(read_model, path)))
        if (path / "preprocessor_config.json").is_file():
            targets.append(
                Target(f"{path.name}-processor", path / "preprocessor_config.json", partial(read_model, path))
            )
    return targets


def prepare_released(folder: Path) -> list[Target]:
    """Released configs without their weights: only the config is read, and the model is built on the meta device."""
    from hub.test_released_configs import RELEASED

    targets = []
    for name in (
        "llava-hf/llava-1.5-7b-hf",
        "openai/clip-vit-large-patch14",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Qwen/Qwen3-VL-2B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "Salesforce/blip2-opt-2.7b",
        "stabilityai/sd-vae-ft-mse",
    ):
        path = folder / name.replace("/", "-")
        path.mkdir(parents=True)
        for file, content in RELEASED[name].items():
            if isinstance(content, dict):
                (path / file).write_text(json.dumps(content))
        targets.append(Target(path.name, path / "config.json", partial(build_without_weights, path)))
    return targets


def build_without_weights(path: Path) -> None:
    from vitrail.hub.checkpoint_info import find_checkpoint
    from vitrail.hub.pretrained import build_on_meta_device

    build_on_meta_device(find_checkpoint(path))


def prepare_safetensors(folder: Path) -> list[Target]:
    targets = prepare_native("model.safetensors", folder / "native")
    hub.to_hf(make_models()["decoder"], folder / "llama")
    targets.append(Target("llama", folder / "llama/model.safetensors", partial(read_model, folder / "llama")))
    return [*targets, Target("tensors", targets[0].file, partial(read_tensors, targets[0].file))]


def read_tensors(file: Path) -> None:
    weights = SafetensorsWeights(file)
    for name in weights:
        weights[name].float().sum()


# ---- GGUF and llama2.c ----------------------------------------------------------------------------------------------


def prepare_gguf(folder: Path) -> list[Target]:
    from hub import test_gguf as gguf

    hub.to_hf(make_models()["decoder"], folder / "llama")
    weights = SafetensorsWeights(folder / "llama")
    config = SimpleNamespace(
        **{"head_dim": None} | json.loads((folder / "llama/config.json").read_text()) | {"tie_word_embeddings": False}
    )
    model = SimpleNamespace(config=config, state_dict=lambda: {name: weights[name] for name in weights})
    for name, extra in {"model": {}, "words": gguf.byte_bpe(), "pieces": SENTENCEPIECE(gguf)}.items():
        metadata, tensors = gguf.export(model, "llama", "F32", **extra)
        (folder / f"{name}.gguf").write_bytes(gguf.gguf(metadata, tensors))
    targets = [Target("model", folder / "model.gguf", partial(read_model, folder / "model.gguf"))]
    for name in ("words", "pieces"):
        targets.append(Target(name, folder / f"{name}.gguf", partial(read_tokenizer, folder / f"{name}.gguf")))
    return targets


def SENTENCEPIECE(gguf: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "t", "▁a", "at", "▁at"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6]
    return {
        "tokenizer.ggml.model": (gguf.STRING, "llama"),
        "tokenizer.ggml.tokens": (gguf.ARRAY, (gguf.STRING, pieces)),
        "tokenizer.ggml.scores": (gguf.ARRAY, (gguf.F32, [-float(n) for n in range(len(pieces))])),
        "tokenizer.ggml.token_type": (gguf.ARRAY, (gguf.I32, kinds)),
        "tokenizer.ggml.bos_token_id": (gguf.U32, 1),
        "tokenizer.ggml.eos_token_id": (gguf.U32, 2),
        "tokenizer.ggml.unknown_token_id": (gguf.U32, 0),
    }


def prepare_llama2c(folder: Path) -> list[Target]:
    from hub import test_llama2c as llama2c

    model, words = folder / "model.bin", folder / "tokenizer.bin"
    llama2c.write_model(model)
    pieces, scores = llama2c.made_of([(0, 1), (1, 2), (2, 3)])
    llama2c.write_vocabulary(words, pieces, scores)
    return [
        Target("model", model, partial(read_model, model)),
        Target("tokenizer", words, partial(read_tokenizer, model)),
    ]


# ---- tokenizers and chat templates ----------------------------------------------------------------------------------


def read_tokenizer(path: Path) -> None:
    """Load a tokenizer and use it."""
    use_tokenizer(hub.load_tokenizer(path))


def use_tokenizer(words: Tokenizer) -> None:
    for text in TEXTS:
        with suppress(VitrailError):
            for literal in (False, True):
                ids, _ = words.encode_spans(text, add_special_tokens=True, literal=literal)
                words.decode(ids)
                "".join(words.decode_stream(ids[:50]))
    for id in range(0, words.vocab_size, max(1, words.vocab_size // 50)):
        with suppress(VitrailError):
            words.to_readable(id)
    if words.chat_template is not None:
        with suppress(VitrailError):
            ChatTemplate.from_tokenizer(words).encode(CONVERSATIONS[0], words)


def prepare_tokenizers(folder: Path) -> list[Target]:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Rust

    corpus = ["the red cube 2024, où est le cube 😀 ?\n\n  don't"] * 9
    own = Tokenizer.train(corpus, 320, special_tokens=["<|im_start|>", "<|im_end|>"], eos="<|im_end|>", bos="<s>")
    own.chat_template = PRESETS["chatml"].source
    pieces = Rust(models.WordPiece({"[UNK]": 0, "the": 1, "red": 2, "##s": 3, "cube": 4}, unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    unigram = Rust(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("t", -3.0), ("e", -3.5)], 0, False))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Prepend("▁")]
    )
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    level = Rust(models.WordLevel({"the": 0, "red": 1, "[UNK]": 2}, unk_token="[UNK]"))
    level.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated"), pre_tokenizers.Whitespace()]
    )
    level.enable_padding(length=8, pad_token="[UNK]")
    level.enable_truncation(16)
    targets = []
    for name, words in {
        "bpe": own,
        **dict(zip(("pieces", "unigram", "level"), map(Tokenizer, (pieces, unigram, level)), strict=True)),
    }.items():
        words.save(folder / name)
        targets.append(Target(name, folder / name / "tokenizer.json", partial(read_tokenizer, folder / name)))
    level_file = folder / "level/tokenizer.json"
    level_file.write_text(level.to_str())
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        targets.append(Target(file.partition(".")[0], folder / "bpe" / file, partial(read_tokenizer, folder / "bpe")))
    return targets


TOKENIZER_PARTS = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "aa"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "ab"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""},
    {"type": "Prepend", "prepend": "x" * 100_000},
    {"type": "Sequence", "normalizers": []},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Sequence", "decoders": []},
    {"type": "Split", "pattern": {"Regex": r"(\w*)*\d"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "NFD"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Strip", "content": " ", "start": 10**9, "stop": 10**9},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0},
    {"type": "UnicodeScripts"},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [10**9], "tokens": ["x"]}},
    },
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": True},
    {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    },
    {
        "id": 2**32 - 1,
        "content": "x",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": True,
    },
    {"id": 3, "content": "", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True, "special": True},
]


def mutate_tokenizer(data: bytes, rng: random.Random) -> bytes:
    """Mutate the JSON, and often put a hostile component, nested to some depth, in the place of another."""
    try:
        tree = json.loads(data)
    except ValueError:
        return mutations.mutate_bytes(data, rng)
    if rng.random() < 0.4 or "model" not in tree:
        return mutations.mutate_json(data, rng)
    part = json.loads(json.dumps(rng.choice(TOKENIZER_PARTS)))
    kind = rng.choice(("normalizers", "pretokenizers", "decoders", "processors"))
    for _ in range(rng.choice((0, 0, 1, 3, 20, 60, 150))):
        part = {"type": "Sequence", kind: [part] * rng.choice((1, 1, 1, 2))}
        if len(json.dumps(part)) > 200_000:
            break
    place = rng.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding", "added_tokens", "model"))
    if place == "added_tokens":
        tree.setdefault(place, []).append(part)
    elif place in tree:
        old = tree[place]
        if isinstance(old, dict) and rng.random() < 0.5 and place not in ("padding", "model"):
            part = {"type": "Sequence", kind: [old, part, part]}
        tree[place] = part
    if rng.random() < 0.3:
        tree = mutations.mutate_tree(tree, rng)
    return json.dumps(tree).encode()


CONVERSATIONS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is <|im_end|> this?"}]},
        {"role": "assistant", "content": "A teal card."},
    ],
    [{"role": "user", "content": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}],
]


def prepare_templates(folder: Path) -> list[Target]:
    words = Tokenizer.train(["the red cube"] * 9, 280, special_tokens=["<|im_end|>", "<image>"], eos="<|im_end|>")

    def read(file: Path) -> None:
        try:
            source = file.read_bytes().decode()
        except UnicodeDecodeError:
            return
        template = ChatTemplate(source)
        with suppress(VitrailError):
            template.render(CONVERSATIONS[1], add_generation_prompt=True, tools=[{"name": "f", "parameters": {"a": 1}}])
        with suppress(VitrailError):
            template.encode(CONVERSATIONS[0], words)

    targets = []
    for name, preset in PRESETS.items():
        file = folder / f"{name}.jinja"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(preset.source, encoding="utf-8")
        targets.append(Target(name, file, partial(read, file)))
    return targets


FORMATS = {
    "safetensors": FuzzFormat(prepare_safetensors, mutations.mutate_header),
    "vitrail.json": FuzzFormat(partial(prepare_native, "vitrail.json"), mutations.mutate_json),
    "config.json": FuzzFormat(prepare_hf, mutations.mutate_json),
    "released-config": FuzzFormat(prepare_released, mutations.mutate_json),
    "gguf": FuzzFormat(prepare_gguf),
    "llama2c": FuzzFormat(prepare_llama2c),
    "tokenizer": FuzzFormat(prepare_tokenizers, mutate_tokenizer),
    "chat-template": FuzzFormat(prepare_templates, template_grammar.mutate),
}
