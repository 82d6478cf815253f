"""`vitrail finetune`: files of every format, resumption after a kill, the adapter in peft, dry runs and bad input."""

import base64
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from helpers import relative
from hub.shrunk_checkpoints import write_checkpoint
from hub.vlm_parity import build_samples, compute_logits, compute_reference
from vitrail import hub
from vitrail.cli.finetune_command import finetune_model, parse_part_rates
from vitrail.errors import ConfigError, DataError
from vitrail.hub.peft_adapters import load_adapter
from vitrail.nn import AttentionPlan
from vitrail.recipe.finetune_memory import count_block_numbers
from vitrail.recipe.finetuning import FinetuneConfig, FinetunePlan, finetune
from vitrail.training.lora import add_lora, quantize_base
from vitrail.training.trainer import Trainer

QUESTION, ANSWER = "what is this?", "a red cube"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint("llava-hf/llava-1.5-7b-hf", tmp_path_factory.mktemp("finetune") / "base")


def encode_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (60, 40), (200, 20, 20)).save(file, "PNG")
    return file.getvalue()


def write_llava(folder, **changes):
    turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    rows = [{"id": n, "image": "photo.png", "conversations": turns} for n in range(6)]
    rows[4] |= changes
    (folder / "photo.png").write_bytes(encode_png())
    (folder / "talks.json").write_text(json.dumps(rows))
    return folder / "talks.json"


def write_sharegpt(folder):
    file = write_llava(folder)
    rows = [{"conversations": row["conversations"], "images": [row["image"]]} for row in json.loads(file.read_text())]
    file.write_text(json.dumps(rows))
    return file


def write_messages(folder):
    (folder / "photo.png").write_bytes(encode_png())
    url = "data:image/png;base64," + base64.b64encode(encode_png()).decode()
    parts = [
        [{"type": "image_url", "image_url": {"url": file}}, {"type": "text", "text": QUESTION}]
        for file in (url, "photo.png") * 3
    ]
    rows = [
        {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]}
        for content in parts
    ]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "talks.jsonl"


def write_parquet(folder):
    messages = [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": ANSWER}]
    table = {"messages": [messages] * 6, "images": [[{"bytes": encode_png(), "path": "photo.png"}]] * 6}
    pq.write_table(pa.table(table), folder / "talks.parquet")
    return folder / "talks.parquet"


def settings(base, data, **more) -> FinetuneConfig:
    defaults = {"batch_size": 2, "lr": 1e-2, "rank": 4, "alpha": 8.0, "max_length": 256, "dtype": "float32"}
    return FinetuneConfig(model=str(base), data=str(data), **defaults | more)


def run(config, out):
    return finetune(config, out, device="cpu", quiet=True)


@pytest.mark.parametrize("write", [write_llava, write_sharegpt, write_messages, write_parquet])
def test_formats_train_and_give_an_adapter(base, tmp_path, write):
    folder = run(settings(base, write(tmp_path), steps=4), tmp_path / "out")
    assert folder == tmp_path / "out/adapter"
    log = [json.loads(line) for line in (tmp_path / "out/finetune/log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0]
    card = (folder / "README.md").read_text()
    assert "6 conversations" in card and "LoRA, rank 4" in card and str(base) in card
    adapted, merged = load_adapter(hub.load(base).float(), folder).eval(), hub.load(tmp_path / "out/final").eval()
    samples = build_samples(merged)
    with torch.no_grad():
        for a, b in zip(compute_logits(adapted, *samples), compute_logits(merged, *samples), strict=True):
            assert relative(a, b) <= 1e-4


def test_the_adapter_gives_the_logits_of_peft(base, tmp_path):
    peft = pytest.importorskip("peft")
    folder = run(settings(base, write_llava(tmp_path), steps=3), tmp_path / "out")
    reference = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    adapted = peft.PeftModel.from_pretrained(reference, folder).eval()
    ours = hub.load(tmp_path / "out/final").eval()
    samples = build_samples(ours)
    with torch.no_grad():
        expected = compute_reference(adapted, *samples, lambda _s, _m, v: {"pixel_values": torch.cat(v)} if v else {})
        for a, b in zip(compute_logits(ours, *samples), expected, strict=True):
            assert relative(a, b) <= 1e-4


@pytest.mark.parametrize(("method", "dtype"), [("lora", "float32"), ("lora", "bfloat16"), ("qlora", "bfloat16")])
def test_a_killed_run_resumes_bit_for_bit(base, tmp_path, monkeypatch, method, dtype):
    config = settings(base, write_llava(tmp_path), steps=4, save_every=2, dropout=0.1, method=method, dtype=dtype)
    run(config, tmp_path / "whole")
    step = Trainer._train_step

    def stop(self, batches):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, batches)

    monkeypatch.setattr(Trainer, "_train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "killed")
    assert not (tmp_path / "killed/adapter").exists()
    saved = load_file(tmp_path / "killed/finetune/checkpoints/step-00000002/model.safetensors")
    assert saved and all(".lora." in name for name in saved)  # the base is built again
    monkeypatch.setattr(Trainer, "_train_step", step)
    run(config, tmp_path / "killed")
    for file in ("adapter/adapter_model.safetensors", "final/model.safetensors"):
        whole, resumed = (load_file(tmp_path / name / file) for name in ("whole", "killed"))
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_bf16_training_has_one_copy_of_the_base(base, tmp_path, monkeypatch, method):
    """No float32 copies of frozen weights; adapters are trained and saved in float32."""
    seen = []
    train = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: seen.append(self) or train(self))
    config = settings(base, write_llava(tmp_path), steps=2, method=method, dtype="bfloat16")
    run(config, tmp_path / "out")
    assert not seen[0]._unrounded and set(seen[0].optimizer.parameter_states) == set(seen[0].optimizer.master_weights())
    adapter = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert any(not torch.equal(t, t.to(torch.bfloat16).float()) for t in adapter.values())
    final, before = (hub.load(path).state_dict() for path in (tmp_path / "out/final", base))
    assert {tensor.dtype for tensor in final.values()} == {torch.bfloat16}
    for name in before:
        if not name.startswith("decoder.blocks."):
            assert torch.equal(final[name], before[name].bfloat16())
    assert ("NF4" in (tmp_path / "out/adapter/README.md").read_text()) == (method == "qlora")


def test_qlora_merges_into_the_weights_it_trained_on(base, tmp_path):
    run(settings(base, write_llava(tmp_path), steps=4, method="qlora"), tmp_path / "out")
    log = [json.loads(line) for line in (tmp_path / "out/finetune/log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0]
    final, adapted = (
        hub.load(tmp_path / "out/final").eval(),
        load_adapter(hub.load(base).float(), tmp_path / "out/adapter"),
    )
    quantize_base(adapted)
    adapted.eval()
    samples = build_samples(final)
    with torch.no_grad():
        for a, b in zip(compute_logits(adapted, *samples), compute_logits(final, *samples), strict=True):
            assert relative(a, b) <= 1e-4


def test_full_training_and_rates_of_parts(base, tmp_path):
    config = settings(base, write_llava(tmp_path), steps=2, method="full", lr=1e-3, part_lrs={"tower": 0.0})
    folder = run(config, tmp_path / "out")
    assert folder == tmp_path / "out/final" and "all weights" in (folder / "README.md").read_text()
    before, after = hub.load(base).state_dict(), hub.load(folder).state_dict()
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"connector", "decoder"}
    assert not (tmp_path / "out/adapter").exists()
    assert parse_part_rates(["tower=0", "connector=1e-5"]) == {"tower": 0.0, "connector": 1e-5}
    with pytest.raises(ConfigError, match="PART=RATE"):
        parse_part_rates(["tower"])


def test_dry_run_prints_what_training_takes(base, tmp_path, capsys):
    data = write_llava(tmp_path)
    finetune_model(str(base), str(data), dry_run=True, rank=2, epochs=4.0, batch_size=4, device="cpu", max_length=128)
    output = capsys.readouterr().out
    assert "6 conversations" in output and "steps: 6 of 4" in output and "LoRA: rank 2" in output
    assert "activations" in output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["lora", "full", "qlora"])
def test_estimate_counts_the_state_of_training(base, tmp_path, monkeypatch, method, dtype):
    config = settings(base, write_llava(tmp_path), rank=16, steps=1, method=method, dtype=dtype)
    memory, counts = FinetunePlan(config, "cpu").estimate_memory(), []
    train = Trainer.train

    def count(self):
        model, state = self.task.model, self.optimizer.state_dict()
        trainable = [p for p in model.parameters() if p.requires_grad]
        groups = ([*model.parameters(), *model.buffers()], trainable, [state[n] for n in state if "steps." not in n])
        counts.extend(sum(t.nbytes for t in group) for group in groups)
        return train(self)

    monkeypatch.setattr(Trainer, "train", count)
    run(config, tmp_path / "out")
    assert [memory[name] for name in ("weights", "gradients", "optimizer")] == counts


def test_estimate_follows_the_settings(base, tmp_path):
    def estimate(**more):
        return FinetunePlan(settings(base, data, **more), "cpu").estimate_memory()

    data = write_llava(tmp_path)
    lora, full, qlora = (estimate(method=method, dtype="bfloat16") for method in ("lora", "full", "qlora"))
    assert sum(qlora.values()) < sum(lora.values()) < sum(full.values())
    assert estimate(gradient_checkpointing=True)["activations"] < estimate()["activations"]
    assert estimate(targets=("tower.*.qkv",))["activations"] > estimate()["activations"]  # through the decoder too
    halves = estimate(method="full", dtype="bfloat16", gradient_accumulation_steps=2)
    assert halves["gradients"] == 3 * full["gradients"]  # bf16 gradients and their float32 sums


@pytest.mark.parametrize("method", ["lora", "full"])
def test_estimate_of_blocks_equals_what_autograd_keeps(base, tmp_path, method):
    """Bytes that the blocks of the decoder keep for the backward pass, without gradient checkpointing."""
    plan = FinetunePlan(settings(base, write_llava(tmp_path), method=method), "cpu")
    model = hub.load(base).float()
    if plan.recipe.lora is not None:
        add_lora(model, plan.recipe.lora)
    block, kept, tokens = model.decoder.blocks[1], {}, 96
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, tokens, model.config.decoder.block.width, requires_grad=True)
    rotation = model.decoder.rotary(torch.arange(tokens)[None])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(x, AttentionPlan(causal=True), rotation=rotation)
    width, saved, _ = count_block_numbers(block)
    assert 4 * tokens * (width + saved) == pytest.approx(
        sum(t.untyped_storage().nbytes() for t in kept.values()), rel=0.15
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image": "missing.png"}, "sample 4: image 'missing.png'"),
        ({"image": ["photo.png"] * 2}, r"sample 4 .*1 × <image>.*2 image files"),
        ({"conversations": []}, r"sample 4 .*no turns"),
        ({"image": "../photo.png"}, "sample 4: image .*leads out of"),
    ],
)
def test_bad_items_are_named(base, tmp_path, changes, match):
    with pytest.raises(DataError, match=match):
        FinetunePlan(settings(base, write_llava(tmp_path, **changes)), "cpu")


def test_bad_data_and_settings_are_refused(base, tmp_path):
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(DataError, match="holds no samples"):
        FinetunePlan(settings(base, tmp_path / "empty.json", data_format="llava"), "cpu")
    data = write_parquet(tmp_path)
    table = pq.read_table(data).to_pydict()
    pq.write_table(pa.table(table | {"images": [*table["images"][:5], []]}), data)
    with pytest.raises(DataError, match="sample 5: its turns show 1 images, but it has 0"):
        FinetunePlan(settings(base, data), "cpu")
    with pytest.raises(ConfigError, match="matches nothing"):
        FinetunePlan(settings(base, write_llava(tmp_path), targets=("decoder.*.wqkv",)), "cpu")
    with pytest.raises(ConfigError, match="--out"):
        finetune_model(str(base), str(write_llava(tmp_path)))
    llama = write_checkpoint("meta-llama/Llama-3.2-1B-Instruct", tmp_path / "llama")
    with pytest.raises(ConfigError, match="vision-language"):
        FinetunePlan(settings(llama, write_llava(tmp_path)), "cpu")
    with pytest.raises(ConfigError, match="256"):  # a conversation that is too long is named when training starts
        run(settings(base, write_llava(tmp_path, conversations=LONG), max_length=256), tmp_path / "out")


LONG = [{"from": "human", "value": "<image>" + QUESTION * 200}, {"from": "gpt", "value": ANSWER}]
