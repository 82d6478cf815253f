"""Synthetic rows of the text benchmarks in their published columns, and a small Llama that scores them."""

import json
import math

import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.processing.tokenizer import Tokenizer

HUB = {
    "arc": [
        {"id": "M1", "question": "Which of these is a gas?", "choices":
         {"text": ["ice", "steam", "a cold river of water", "snow"], "label": ["A", "B", "C", "D"]}, "answerKey": "B"},
        {"id": "M2", "question": "What do plants need ", "choices":
         {"text": ["light", "naïve — words", " two  spaces "], "label": ["1", "2", "3"]}, "answerKey": "1"},
        {"id": "M3", "question": "Why is the sky blue?\nThink.", "choices":
         {"text": ["it's painted", "light is scattered", "it is not", "nobody knows", "因为"],
          "label": ["A", "B", "C", "D", "E"]}, "answerKey": "E"},
    ],
    "hellaswag": [
        {"ind": 4, "activity_label": "Roof removal", "ctx_a": "A man is on a roof.", "ctx_b": "he", "ctx":
         "A man is on a roof. he", "endings": ["starts pulling up roofing.", "is ripping level tiles off.",
         "holds [substeps] a cube.", "sings."], "source_id": "activitynet~v_1", "split": "val",
         "split_type": "indomain", "label": "3"},
        {"ind": 9, "activity_label": "Home", "ctx_a": "[header] How to build a wall [title] Find bricks. [step] Look",
         "ctx_b": "", "ctx": "", "endings": ["[substeps] Buy them  now.", "Ask [title] Wait", "Paint it.",
         "Stack bricks on a bed of mortar, one by one."], "source_id": "wikihow~7", "split": "val",
         "split_type": "zeroshot", "label": "0"},
        {"ind": 10, "activity_label": "Home", "ctx_a": "How to build a wall [title]", "ctx_b": "THE mason",
         "ctx": "", "endings": ["rests", "goes on and on with his long work", "sits", "reads"],
         "source_id": "wikihow~7", "split": "val", "split_type": "zeroshot", "label": "1"},
    ],
    "piqa": [
        {"goal": "To open a jar", "sol1": "tap the lid on a table", "sol2": "tap the lid on a cloud", "label": 0},
        {"goal": "how do you dry a wet shoe?", "sol1": "put it into a bucket of water", "sol2": "stuff it", "label": 1},
    ],
    "siqa": [
        {"context": "Alex was late.", "question": "Why did Alex run?", "answerA": "to be on time", "answerB": "for fun",
         "answerC": "because the sky is blue", "label": "1"},
        {"context": "Alex was late.", "question": "How would others feel?", "answerA": "annoyed",
         "answerB": "like a ball", "answerC": "hungry", "label": "3"},
    ],
    "winogrande": [
        {"sentence": "Sarah was a better surgeon than Maria so _ always got the easier cases.", "option1": "Sarah",
         "option2": "Maria", "answer": "2"},
        {"sentence": "The red cube did not fit into the box because the _ is too large.", "option1": "red cube",
         "option2": "box", "answer": "1"},
        {"sentence": "_ was late, so _ ran.", "option1": "Alex", "option2": "The bus ", "answer": "1"},
    ],
}  # fmt: skip


def corpus() -> list[str]:
    return [json.dumps(row, ensure_ascii=False) for rows in HUB.values() for row in rows] * 3


def pieces() -> Tokenizer:
    """A tokenizer like that of Llama 2: all words start with ▁, and unknown characters become bytes."""
    rust = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *spelled], show_progress=False
    )
    rust.train_from_iterator(corpus(), trainer)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return Tokenizer(rust, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"})


def words_of(kind: str) -> Tokenizer:
    if kind == "pieces":
        return pieces()
    return Tokenizer.train(
        corpus(), 384, bos=None if kind == "without bos" else "<s>", eos="</s>", special_tokens=("</s>",)
    )


# Tokenizer kind, and context length of the model.
KINDS = {"bytes": 128, "without bos": 128, "pieces": 128, "short": 40}


def decoder(vocab: int, context: int = 128) -> Decoder:
    """A Llama with weights from a formula, equal on all machines."""
    block = BlockConfig(
        width=32, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedMLPConfig(intermediate_size=48), norm="rms"
    )
    rotary = RotaryConfig(head_dim=8)
    model = Decoder(DecoderConfig(vocab_size=vocab, layers=2, block=block, rotary=rotary, context_length=context))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            at = torch.arange(parameter.numel(), dtype=torch.float64) + 1
            wave = torch.sin(at * at * math.sqrt(number + 2)).view(parameter.shape)
            parameter.copy_(1 + 0.1 * wave if parameter.ndim == 1 else 0.3 * wave)
    return model


def llama(folder, kind: str = "bytes") -> None:
    """The same as a Hugging Face folder."""
    words = words_of(kind)
    hub.to_hf(decoder(words.vocab_size, KINDS[kind]), folder, tokenizer=words)
