"""GGUF files, written byte by byte from the format specification."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize, relative
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import load, load_tokenizer
from vitrail.hub.gguf import GGUFFile
from vitrail.hub.gguf_quantization import QUANTIZATION_TYPES
from vitrail.hub.llama2c import read_tokenizer as read_llama2c
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMAT = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True))

# ---- a small writer ---------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(kind, content) -> bytes:
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack("<" + FORMAT[kind], content)


def gguf(metadata: dict, tensors: dict | None = None, version=3, align=32) -> bytes:
    """Build a file from metadata (key → (type, value)) and tensors (name → (type, shape, bytes))."""
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, content) in metadata.items():
        head += string(key) + struct.pack("<I", kind) + value(kind, content)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        dims = shape[::-1]
        head += string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % align)
    return head + b"\0" * (-len(head) % align) + data


# ---- number types -----------------------------------------------------------------------------------------------

# Answers of the `gguf` package's own dequantiser for the block whose byte k is 37·k + 11·type, with scales 0.25, 0.5
# at the bytes named: numbers 0, 1, 15, 16, 31, the middle one and the last two, and the sum of (place × number).
KNOWN = {
    2: ("Q4_0", 18, [0], [-2.0, -0.75, 0.75, -0.5, 0.0], [-0.5, -0.5, 0.0], -34.0),
    3: ("Q4_1", 20, [0, 2], [1.75, 3.0, 0.5, 3.25, 4.0], [3.25, 3.25, 4.0], 1290.5),
    6: ("Q5_0", 22, [0], [-4.0, -2.75, 2.75, -3.5, 1.0], [-3.5, 0.5, 1.0], 306.0),
    7: ("Q5_1", 24, [0, 2], [5.75, 3.0, 0.5, 6.25, 3.0], [6.25, 6.25, 3.0], 1910.5),
    8: ("Q8_0", 34, [0], [-23.5, -14.25, -12.75, -3.5, 7.25], [-3.5, -2.0, 7.25], -1840.0),
    12: ("Q4_K", 144, [0, 2], [2.0, 32.0, 68.0, 2.0, 68.0], [-18.0, -5.0, 18.5], 829376.0),
    13: ("Q5_K", 176, [0, 2], [243.75, 7.5, 60.0, 243.75, 60.0], [67.25, 110.0, 131.0], 2675454.0),
    14: ("Q6_K", 210, [208], [225.0, 697.5, -247.5, 317.5, -349.25], [-315.0, 584.25, 522.75], 431205.0),
}


def block(kind: int) -> bytes:
    _, size, scales, *_ = KNOWN[kind]
    raw = bytearray((37 * k + 11 * kind) % 256 for k in range(size))
    for at, scale in zip(scales, (0.25, 0.5), strict=False):
        raw[at : at + 2] = np.array([scale], "<f2").tobytes()
    return bytes(raw)


@pytest.mark.parametrize("kind", KNOWN)
def test_dequantization_known_values(kind, tmp_path):
    name, size, _, begin, end, total = KNOWN[kind]
    quant = QUANTIZATION_TYPES[kind]
    assert (quant.name, quant.block_bytes) == (name, size)
    path = tmp_path / "x.gguf"
    # twice in a row and two rows, so that blocks and rows are told apart
    path.write_bytes(gguf({}, {"x": (kind, (2, 2 * quant.block_length), block(kind) * 4)}))
    x = GGUFFile(path).read_tensor("x")
    assert x.shape == (2, 2 * quant.block_length) and x.dtype == torch.float32
    assert torch.equal(x[0], x[1]) and torch.equal(x[0, : quant.block_length], x[0, quant.block_length :])
    x = x[0, : quant.block_length]
    assert x[[0, 1, 15, 16, 31]].tolist() == begin and x[[quant.block_length // 2, -2, -1]].tolist() == end
    assert (x.double() * torch.arange(1, quant.block_length + 1)).sum().item() == total


@pytest.mark.parametrize(("kind", "dtype"), [(0, torch.float32), (1, torch.float16), (30, torch.bfloat16)])
def test_float_types(kind, dtype, tmp_path):
    x = torch.randn(3, 5).to(dtype)
    (tmp_path / "x.gguf").write_bytes(gguf({}, {"x": (kind, (3, 5), x.view(torch.uint8).numpy().tobytes())}))
    assert torch.equal(GGUFFile(tmp_path / "x.gguf").read_tensor("x"), x.float())


# ---- metadata ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_all_metadata_types(version, tmp_path):
    given = {
        "u8": (U8, 200), "i8": (I8, -100), "u16": (U16, 60000), "i16": (I16, -30000), "u32": (U32, 4_000_000_000),
        "i32": (I32, -5), "f32": (F32, 0.5), "yes": (BOOL, True), "text": (STRING, "où 😀"), "u64": (U64, 2**63),
        "i64": (I64, -(2**62)), "f64": (F64, 0.1),
    }  # fmt: skip
    arrays = {
        "numbers": (ARRAY, (I16, [1, -2, 3])),
        "flags": (ARRAY, (BOOL, [True, False])),
        "words": (ARRAY, (STRING, ["a", "", "é"])),
        "nested": (ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"])])),
        "none": (ARRAY, (STRING, [])),
    }
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf(given | arrays, version=version))
    found = GGUFFile(path).metadata
    assert {key: found[key] for key in given} == {key: content for key, (_, content) in given.items()}
    assert [found[key] for key in arrays] == [[1, -2, 3], [True, False], ["a", "", "é"], [[1, 2], ["x"]], []]


def test_alignment(tmp_path):
    x = np.arange(3, dtype="<f4").tobytes()
    for align in (8, 64, 4096):
        data = gguf({"general.alignment": (U32, align)}, {"a": (0, (3,), x), "b": (0, (3,), x)}, align=align)
        (tmp_path / "x.gguf").write_bytes(data)
        assert GGUFFile(tmp_path / "x.gguf").read_tensor("b").tolist() == [0, 1, 2]


# ---- models -----------------------------------------------------------------------------------------------------

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def theirs(arch: str, **more):
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    config = getattr(transformers, f"{name}Config")(**COMMON | more)
    return randomize(getattr(transformers, f"{name}ForCausalLM")(config), 1).eval()


def q8_0(x: torch.Tensor) -> bytes:
    rows = x.numpy().reshape(-1, 32)
    scale = (np.abs(rows).max(1, keepdims=True) / 127).astype("<f2")
    whole = np.round(rows / scale.astype(np.float32)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), whole.view(np.uint8)], axis=1).tobytes()


def store(x: torch.Tensor, kind: str) -> tuple:
    if kind == "F32" or x.ndim == 1:
        return 0, tuple(x.shape), x.numpy().astype("<f4").tobytes()
    if kind == "F16":
        return 1, tuple(x.shape), x.numpy().astype("<f2").tobytes()
    return 8, tuple(x.shape), q8_0(x)


def export(model, arch: str, kind: str = "F32", **extra) -> tuple[dict, dict]:
    """Write a file like the converter of llama.cpp."""
    c = model.config
    D = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    tensors = {}
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = len(x) // D
            x = x.reshape(heads, 2, D // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            rest, _, part = rest.rpartition(".")
            name = f"blk.{layer}.{NAMES[rest]}.{part}"
        else:
            name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
            name = name.replace("lm_head", "output")
        tensors[name] = store(x, kind)
    metadata = {
        "general.architecture": (STRING, arch),
        f"{arch}.block_count": (U32, c.num_hidden_layers),
        f"{arch}.context_length": (U32, c.max_position_embeddings),
        f"{arch}.embedding_length": (U32, c.hidden_size),
        f"{arch}.feed_forward_length": (U32, c.intermediate_size),
        f"{arch}.attention.head_count": (U32, c.num_attention_heads),
        f"{arch}.attention.head_count_kv": (U32, c.num_key_value_heads),
        f"{arch}.attention.key_length": (U32, D),
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, c.rms_norm_eps),
        f"{arch}.rope.freq_base": (F32, 20_000.0),
        **extra,
    }
    return metadata, tensors


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 53, 58]])
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    ],
)
def test_logits_match_transformers(arch, more, tmp_path):
    reference = theirs(arch, **more, **THETA)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(*export(reference, arch)))
    model = load(path)
    with torch.no_grad():
        assert relative(model(IDS), reference(IDS).logits) < 1e-5
    assert (
        model.config.tie_word_embeddings == reference.config.tie_word_embeddings and model.config.context_length == 64
    )


def test_half_precision_file_with_float32_norms(tmp_path):
    reference = theirs("llama", **THETA)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(*export(reference, "llama", "F16")))
    model = load(path)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    with torch.no_grad():
        assert relative(load(path, dtype=torch.float32)(IDS), reference(IDS).logits) < 0.02


def test_quantized_files_become_float32(tmp_path):
    reference = theirs("llama", **THETA)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(*export(reference, "llama", "Q8_0")))
    model = load(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert relative(model(IDS), reference(IDS).logits) < 0.1


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 20_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_rope_scaling(tmp_path):
    path = tmp_path / "model.gguf"
    wide = {"hidden_size": 128, "num_hidden_layers": 1}  # heads of 32 channels, so that the ramp is met
    reference = theirs("llama", rope_parameters=LLAMA3, **wide)
    plain = 20_000.0 ** (-torch.arange(0, 32, 2) / 32)
    factors = (plain / reference.model.rotary_emb.inv_freq).float()
    assert 2 < len(factors.unique())
    metadata, tensors = export(reference, "llama")
    path.write_bytes(gguf(metadata, tensors | {"rope_freqs.weight": store(factors, "F32")}))
    ids = torch.randint(61, (1, 60))
    with torch.no_grad():
        assert relative(load(path)(ids), reference(ids).logits) < 1e-5
    path.write_bytes(gguf(metadata, tensors | {"rope_freqs.weight": store(factors + 0.1, "F32")}))
    with pytest.raises(CheckpointError, match="scaling of Llama 3"):
        load(path)
    linear = {"rope_parameters": {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 4.0}}
    reference = theirs("llama", **linear)
    scaling = {"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, 4.0)}
    path.write_bytes(gguf(*export(reference, "llama", **scaling)))
    with torch.no_grad():
        assert relative(load(path)(IDS), reference(IDS).logits) < 1e-5


# ---- what does not fit ------------------------------------------------------------------------------------------


def altered(tmp_path, metadata=None, tensors=None, **changes):
    """Build a valid file with some metadata or tensors replaced; None removes one."""
    m, t = export(theirs("llama", **THETA), "llama")
    m |= {key.replace("__", "."): content for key, content in changes.items()} | (metadata or {})
    t |= tensors or {}
    path = tmp_path / "model.gguf"
    m, t = ({k: v for k, v in d.items() if v is not None} for d in (m, t))
    path.write_bytes(gguf(m, t))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general__architecture": (STRING, "mamba")}, "architecture 'mamba'"),
        ({"general__architecture": (U32, 3)}, "architecture"),
        ({"llama__block_count": (U32, 2**32 - 1)}, "declares 4294967295 blocks"),
        ({"llama__block_count": (U32, 1)}, "does not have: blk.1"),
        ({"llama__block_count": (U32, 0)}, "0 blocks"),
        ({"llama__embedding_length": (U64, 2**62)}, "width is"),
        ({"llama__attention__head_count": (U32, 0)}, "0 heads"),
        ({"llama__attention__head_count": (U32, 2**31)}, "heads"),
        ({"llama__attention__head_count_kv": (ARRAY, (U32, [2, 2]))}, "head_count_kv"),
        ({"llama__attention__key_length": (U64, 2**60)}, "channels"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "epsilon is missing"),
        ({"llama__rope__dimension_count": (U32, 4)}, "rotates 4 of 8 channels"),
        ({"llama__rope__scaling__type": (STRING, "longrope")}, "longrope"),
        ({"tensors": {"blk.0.attn_k.weight": None}}, "attn_k"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "up_proj"),
        ({"tensors": {"blk.1.ffn_up.weight": (0, (3, 32), bytes(384))}}, "3 rows"),
        ({"tensors": {"blk.1.attn_output.weight": (0, (32, 31), bytes(3968))}}, "has shape"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": (0, (1, 1, 32), bytes(128))}}, "ffn_gate_exps"),
    ],
)
def test_inconsistent_model_raises(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load(altered(tmp_path, **change))


HUGE = 2**62


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GGU", "needs 4 bytes"),
        (b"GGML" * 9, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 3), "tensors at byte 8 needs 8 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors and has"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata pairs and has"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + b"k" * 40, "needs 4,611,686"),
        (gguf({"k": (STRING, "x" * 90)})[:-60], "truncated"),
        (gguf({"k": (ARRAY, (STRING, []))})[:37] + struct.pack("<IQ", STRING, HUGE), "values of"),
        (gguf({"k": (ARRAY, (U8, []))})[:37] + struct.pack("<IQ", U8, HUGE), "values of"),
        (gguf({"k": (ARRAY, (ARRAY, [(ARRAY, [(ARRAY, [(ARRAY, [(U8, [1])])])])]))}), "4 deep"),
        (gguf({"k": (U8, 1)}).replace(b"k" + struct.pack("<I", U8), b"k" + struct.pack("<I", 99)), "unknown type 99"),
        (gguf({"general.alignment": (U32, 24)}), "power of 2"),
        (gguf({"general.alignment": (STRING, "x")}), "power of 2"),
        (gguf({}, {"x": (0, (1,), b"")}), "truncated"),
        (gguf({}, {"x": (0, (HUGE, 2**40), b"")}), "truncated"),
        (gguf({}, {"x": (0, (0, 4), b"")}), "not divisible"),
        (gguf({}, {"x": (8, (2, 33), bytes(100))}), "not divisible into Q8_0"),
        (gguf({}, {"x": (11, (256,), bytes(200))}), "type 11"),
        (gguf({}, {"x": (0, (1,) * 5, bytes(4))}), "5 axes"),
    ],
)  # fmt: skip
def test_malicious_files_raise(data, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_duplicate_key_or_tensor_raises(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf({"aa": (U8, 1), "ab": (U8, 2)}).replace(b"ab", b"aa"))
    with pytest.raises(CheckpointError, match="twice"):
        GGUFFile(path)
    path.write_bytes(gguf({}, {"ta": (0, (1,), bytes(4)), "tb": (0, (1,), bytes(4))}).replace(b"tb", b"ta"))
    with pytest.raises(CheckpointError, match="duplicate"):
        GGUFFile(path)


# ---- tokenizers -------------------------------------------------------------------------------------------------

WORDS = Tokenizer.train(
    ["the red cube 2024, où est le cube 😀 ?\n\n  don't"] * 9, 330, special_tokens=["<|im_end|>"], eos="<|im_end|>"
)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_bpe(**changes) -> dict:
    model = json.loads(WORDS._rust.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    made = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3 if t == "<|im_end|>" else 1 for t in tokens])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [" ".join(pair) for pair in model["merges"]])),
        "tokenizer.ggml.eos_token_id": (U32, 0),
        "tokenizer.ggml.bos_token_id": (U32, 0),
        "tokenizer.chat_template": (STRING, TEMPLATE),
    }
    made |= {f"tokenizer.ggml.{key}": content for key, content in changes.items()}
    return {key: content for key, content in made.items() if content is not None}


def read(tmp_path, metadata) -> Tokenizer:
    path = tmp_path / "words.gguf"
    path.write_bytes(gguf(metadata))
    return load_tokenizer(path)


def test_byte_level_tokenizer(tmp_path):
    words = read(tmp_path, byte_bpe())

    @settings(max_examples=100)
    @given(st.text("the red2024cube, \n\t'où😀漢", max_size=30))
    def same(text):
        assert words.encode(text) == WORDS.encode(text)
        assert words.decode(words.encode(text)) == text

    same()
    assert (words.eos_token_id, words.stop_ids, words.vocab_size) == (0, (0,), WORDS.vocab_size)
    assert words.encode("red<|im_end|>")[-1] == 0
    assert words.encode("a", add_special_tokens=True) == words.encode("a")
    assert ChatTemplate.from_tokenizer(words).encode([{"role": "user", "content": "red"}], words).ids[-1] == 0
    assert read(tmp_path, byte_bpe(add_bos_token=(BOOL, True))).encode("a", add_special_tokens=True)[0] == 0


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_other_pre_tokenizers_round_trip(pre, tmp_path):
    words = read(tmp_path, byte_bpe(pre=(STRING, pre)))
    for text in ("the red cube 2024", "I'LL don't", "  où\n\n 漢"):
        assert words.decode(words.encode(text)) == text
    digits = [words.id_to_token(i) for i in words.encode("2024")]
    assert len(digits) == {"gpt-2": 4, "llama-bpe": 4, "qwen2": 4}[pre]


def test_sentencepiece_tokenizer(tmp_path):
    grown = ["▁a", "ab", "▁ab", "▁▁", "b▁", "▁", "a", "b"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *grown]
    scores = [0.0] * 259 + [-float(n) for n in range(len(grown))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(grown)]
    metadata = {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, pieces)),
        "tokenizer.ggml.scores": (ARRAY, (F32, scores)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, kinds)),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.unknown_token_id": (U32, 0),
        "tokenizer.ggml.eot_token_id": (U32, 1),
    }
    words = read(tmp_path, metadata)
    entries = [p.replace("▁", " ").encode() for p in pieces]
    data = b"".join(struct.pack("<fi", s, len(p)) + p for s, p in zip(scores, entries, strict=True))
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<i", 9) + data)
    same = read_llama2c(tmp_path / "tokenizer.bin")
    for text in ("ab", " ab  b a", "é漢\n", "", "aabb ab", "a<s>b"):
        assert words.encode(text, add_special_tokens=True) == same.encode(text, add_special_tokens=True)
        if "<s>" not in text:  # after a special token a text begins anew, with a space
            assert words.decode(words.encode(text)) == text
    assert words.encode("▁ab") == words.encode(" ab")  # these vocabularies write a space so
    assert words.stop_ids == (2, 1)
    bare = read(tmp_path, metadata | {"tokenizer.ggml.add_space_prefix": (BOOL, False)})
    assert bare.encode("ab") == [260] and words.encode("ab") == [261]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": (STRING, "bert")}, "'bert'"),
        ({"pre": (STRING, "unheard")}, "'unheard'"),
        ({"pre": None}, "'missing'"),
        ({"tokens": (ARRAY, (U32, [1]))}, "not a list of strings"),
        (
            {"tokens": (ARRAY, (STRING, ["a", "a"])), "token_type": None, "merges": (ARRAY, (STRING, []))},
            "in the vocabulary twice",
        ),
        ({"tokens": (ARRAY, (STRING, ["a" * 2000])), "token_type": None}, "2000 characters"),
        ({"token_type": (ARRAY, (I32, [1]))}, "do not match"),
        ({"eos_token_id": (U32, 99_999)}, "99999"),
        ({"merges": (ARRAY, (STRING, ["xyz"]))}, "'xyz'"),
        ({"merges": (ARRAY, (STRING, ["nothing here"]))}, "'nothing here'"),
        ({"merges": None}, "merges is missing"),
    ],
)
def test_inconsistent_vocabulary_raises(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, byte_bpe(**change))


def test_any_damage_raises_checkpoint_error(tmp_path):
    metadata, tensors = export(theirs("llama", **THETA), "llama", "Q8_0")
    whole = gguf(metadata | byte_bpe(), tensors)
    path = tmp_path / "model.gguf"
    head = whole.index(b"blk.1.")  # the header is what steers; the rest is numbers

    @settings(max_examples=150)
    @given(st.lists(st.tuples(st.integers(4, head), st.integers(0, 255)), max_size=3), st.none() | st.integers(4, head))
    def survives(changes, end):
        data = bytearray(whole)
        for at, byte in changes:
            data[at] = byte
        path.write_bytes(data[:end])
        for use in (load, load_tokenizer):
            try:
                use(path)
            except VitrailError as error:
                assert error.problem

    survives()
