"""The load-balancing loss of mixtures of experts in the tasks text and chat: values, defaults, logs and effect."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from helpers import randomize
from hub.shrunk_checkpoints import write_checkpoint
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.data.sampler import MixtureConfig
from vitrail.nn import AttentionConfig, BlockConfig, MoEConfig, RotaryConfig
from vitrail.nn.mlp import MoE, load_balancing_loss
from vitrail.recipe.finetuning import FinetuneConfig, finetune
from vitrail.tasks.chat_task import BATCH_FIELDS, ChatSettings, ChatTask
from vitrail.tasks.text_task import TextSettings, TextTask
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer

EXPERTS, ACTIVE, LENGTH = 4, 2, 16


def build_model(coefficient: float = 0.5) -> Decoder:
    """Build a decoder whose routers prefer the experts 0 and 1 for every token."""
    mlp = MoEConfig(
        num_experts=EXPERTS, experts_per_token=ACTIVE, intermediate_size=16, router_aux_loss_coef=coefficient
    )
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=mlp, norm="rms")
    model = randomize(Decoder(DecoderConfig(vocab_size=32, layers=2, block=block, rotary=RotaryConfig(8))), 0, 0.1)
    with torch.no_grad():
        model.embed.weight[:, 0] = 1.0  # a common direction of all tokens
        for module in model.modules():
            if isinstance(module, MoE):
                module.router.weight[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    return model


class Windows:
    fingerprint = "windows"

    def __len__(self):
        return 64

    def __getitem__(self, item):
        return np.random.default_rng(item).integers(0, 32, LENGTH + 1)


def measure_loads(model) -> list[float]:
    """Return the share of the least used expert of each layer."""
    ids, found = torch.from_numpy(np.stack([Windows()[n] for n in range(16)])), []

    def record(module, inputs, _output):
        selected = module.select_experts(inputs[0].flatten(0, -2))[2]
        found.append(float(selected.flatten().bincount(minlength=EXPERTS).min() / selected.numel()))

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, MoE)]
    with torch.no_grad():
        model.eval()(ids)
    for hook in hooks:
        hook.remove()
    return found


def train(model, folder, settings=None, **more) -> list[dict]:
    """Train and return the log."""
    stage = StageConfig(
        name="tune",
        task="text",
        steps=60,
        batch_size=8,
        mixture=MixtureConfig(weights={"windows": 1.0}),
        optim=OptimConfig(lr=1e-2, weight_decay=0.0),
        **more,
    )
    Trainer(stage, TextTask(model, settings), {"windows": Windows()}, folder, quiet=True, device="cpu").train()
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_without_the_loss_the_experts_are_unbalanced(tmp_path):
    balanced, unbalanced = build_model(), build_model()
    assert max(measure_loads(balanced)) < 0.02
    log = train(balanced, tmp_path / "with")
    train(unbalanced, tmp_path / "without", TextSettings(balancing_loss=0.0))
    assert min(measure_loads(balanced)) > 0.12
    assert min(measure_loads(unbalanced)) < 0.02
    rows = [row for row in log if "loss/experts/0" in row]
    for layer in ("loss/experts/0", "loss/experts/1"):
        assert rows[-1][layer] < rows[0][layer]
        assert rows[-1][layer] < 1.1 * ACTIVE  # 2 under an even load
    first = rows[0]
    total = first["loss/text"] + 0.5 * (first["loss/experts/0"] + first["loss/experts/1"]) / 2
    assert first["loss"] == pytest.approx(total, rel=1e-5)


def test_a_layer_has_the_loss_of_transformers():
    model = build_model().train()
    task = TextTask(model)
    assert task.loss_weights == {"text": 1.0, "experts/0": 0.25, "experts/1": 0.25}
    batch, logits = task.collate([Windows()[0], Windows()[1]]), []
    for module in model.modules():
        if isinstance(module, MoE):
            module.router.register_forward_hook(lambda _m, _i, output: logits.append(output.detach()))
    losses = task(batch)
    assert task.count_loss_terms(batch).keys() == losses.keys() == task.loss_weights.keys()
    for layer, found in enumerate(logits):
        expected = load_balancing_loss_func((found,), EXPERTS, ACTIVE)
        assert losses[f"experts/{layer}"].item() == pytest.approx(expected.item(), rel=1e-5)
    model.eval()
    assert task(batch).keys() == task.count_loss_terms(batch).keys() == {"text"}


def test_padding_does_not_count():
    torch.manual_seed(0)
    logits, mask = torch.randn(3 * 5, EXPERTS), torch.ones(3, 5, dtype=torch.long)
    mask[0, 3:] = mask[2, 1:] = 0
    indices = logits.softmax(-1).topk(ACTIVE).indices
    found = load_balancing_loss(logits.softmax(-1), indices, mask.bool())
    expected = load_balancing_loss_func((logits,), EXPERTS, ACTIVE, mask)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    kept = mask.flatten().bool()
    assert found.item() == pytest.approx(load_balancing_loss(logits.softmax(-1)[kept], indices[kept]).item(), rel=1e-5)
    assert found.item() != pytest.approx(load_balancing_loss(logits.softmax(-1), indices).item(), rel=1e-3)


def test_padding_of_packed_rows_does_not_change_the_loss(tmp_path):
    base = write_checkpoint("Qwen/Qwen3-VL-30B-A3B-Instruct", tmp_path / "base")
    turns = [{"from": "human", "value": "what is this?"}, {"from": "gpt", "value": "a red cube"}]
    long = [turns[0], {"from": "gpt", "value": "a red cube " * 4}]
    (tmp_path / "talks.json").write_text(json.dumps([{"conversations": turns}, {"conversations": long}]))
    source = ConversationSource(ConversationsConfig(path=str(tmp_path / "talks.json")))
    model = hub.load(base).float().train()
    task = ChatTask(model, {"talks": source}, hub.load_tokenizer(base), ChatSettings(max_length=128))
    batch = task.collate([source[0], source[1]])
    rows, length = batch["segments"].shape
    assert rows == 1  # so that the places of features do not change
    wide = dict(batch)
    for field in BATCH_FIELDS:
        fill = {"segments": -1, "targets": -100}.get(field, 0)
        padding = torch.full_like(batch[field], fill)
        wide[field] = torch.cat([batch[field], padding], 1)
    assert wide["segments"].shape == (1, 2 * length)
    losses, padded = task(batch), task(wide)
    names = [name for name in losses if name.startswith("experts/")]
    assert names
    for name in names:
        assert padded[name].item() == pytest.approx(losses[name].item(), rel=1e-4)


def test_gradient_checkpointing_has_the_same_losses_and_weights(tmp_path):
    models, logs = [build_model(), build_model()], []
    for model, checkpointing in zip(models, (False, True), strict=True):
        logs.append(train(model, tmp_path / str(checkpointing), gradient_checkpointing=checkpointing))
    ends = [[row["loss/experts/1"] for row in log if "loss/experts/1" in row][-1] for log in logs]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_the_coefficient_of_deepseek_is_read_and_written(tmp_path):
    base = write_checkpoint("deepseek-ai/DeepSeek-V3", tmp_path / "base")
    for alpha in (None, 0.003):
        hf_config = json.loads((base / "config.json").read_text())
        hf_config.pop("aux_loss_alpha", None)
        (base / "config.json").write_text(json.dumps(hf_config | ({} if alpha is None else {"aux_loss_alpha": alpha})))
        model = hub.load(base)
        (experts,) = {module.config for module in model.modules() if isinstance(module, MoE)}
        # DeepSeek divides by the number of experts per token, transformers and we do not.
        assert experts.router_aux_loss_coef * experts.experts_per_token == pytest.approx(alpha or 0.001)
        hub.to_hf(model, tmp_path / "back")
        assert json.loads((tmp_path / "back/config.json").read_text())["aux_loss_alpha"] == (alpha or 0.001)


@pytest.mark.parametrize("name", ["mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"])
def test_the_coefficient_of_a_checkpoint_is_read_and_written(tmp_path, name):
    expected = {"mistralai/Mixtral-8x7B-v0.1": 0.02, "Qwen/Qwen3-30B-A3B": 0.001}[name]
    model = hub.load(write_checkpoint(name, tmp_path / "base"))
    weights = TextTask(model).loss_weights
    assert sum(weight for key, weight in weights.items() if key != "text") == pytest.approx(expected)
    hub.to_hf(model, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["router_aux_loss_coef"] == expected


def test_chat_logs_the_loss_of_each_layer(tmp_path):
    base = write_checkpoint("Qwen/Qwen3-VL-30B-A3B-Instruct", tmp_path / "base")
    Image.new("RGB", (60, 40), (200, 20, 20)).save(tmp_path / "photo.png")
    turns = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a red cube"}]
    (tmp_path / "talks.json").write_text(json.dumps([{"image": "photo.png", "conversations": turns}] * 2))
    config = FinetuneConfig(
        model=str(base), data=str(tmp_path / "talks.json"), batch_size=2, steps=1, max_length=256, dtype="float32"
    )
    run = partial(finetune, device="cpu", quiet=True)
    assert run(config, tmp_path / "out") == tmp_path / "out/adapter"
    row = next(json.loads(line) for line in (tmp_path / "out/finetune/log.jsonl").open() if "loss/answers" in line)
    experts = [row[key] for key in sorted(row) if key.startswith("loss/experts/")]
    assert len(experts) == hub.load(base).config.decoder.layers and min(experts) > 0
    coefficient = json.loads((base / "config.json").read_text())["text_config"].get("router_aux_loss_coef", 0.001)
    assert row["loss"] - row["loss/answers"] == pytest.approx(coefficient * np.mean(experts), rel=1e-2)
