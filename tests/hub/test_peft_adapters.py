"""LoRA adapters in the format of PEFT give the logits of transformers with peft, in both directions."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import vitrail
from helpers import relative
from hub.shrunk_checkpoints import write_checkpoint
from hub.vlm_parity import build_samples, compute_logits, is_image
from vitrail import hub
from vitrail.cli.checkpoint_conversion_command import export_checkpoint
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub import peft_adapters
from vitrail.hub.checkpoint_info import find_checkpoint
from vitrail.models.vlm import VLM
from vitrail.training.lora import LoRAConfig, LoRALinear, add_lora, lora_state_dict, merge_lora

LOGITS = 1e-4
IDS = torch.tensor([[1, 5, 2, 7, 7, 0, 12, 31]])
LLAMA, LLAVA, QWEN = "meta-llama/Llama-3.2-1B-Instruct", "llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2-VL-7B-Instruct"
PHI = "microsoft/phi-4"  # fused qkv_proj and gate_up_proj
TARGETS = {
    LLAMA: ("*.q", "*.v", "*.out", "*.gate_up", "*.down"),
    LLAVA: ("decoder.*.qkv", "decoder.*.gate_up.up", "tower.*.q", "connector"),
    QWEN: ("decoder.*.q", "decoder.*.v", "tower.*.qkv", "decoder.*.down"),
    PHI: ("*.q", "*.v", "*.gate_up.up", "*.down"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Shrunk checkpoints by name, written on first use."""
    root, made = tmp_path_factory.mktemp("peft"), {}

    def find(name):
        if name not in made:
            made[name] = write_checkpoint(name, root / name.replace("/", "-"))
            if name == PHI:  # its padding id is beyond the shrunk vocabulary
                file = made[name] / "config.json"
                file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": None}))
        return made[name]

    return find


def load_reference(folder):
    """Load the checkpoint with transformers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    is_vlm = hasattr(config, "vision_config")
    cls = transformers.AutoModelForImageTextToText if is_vlm else transformers.AutoModelForCausalLM
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def run_reference(reference, sample, images, name):
    """Return the logits of transformers for one sample."""
    inputs = {} if images is None else {"pixel_values": images.pixels}
    if name == QWEN and images is not None:
        inputs["image_grid_thw"] = torch.tensor([[grid.t, grid.h, grid.w] for grid in images.layouts])
        inputs["mm_token_type_ids"] = is_image(sample).long()[None]
    return reference(input_ids=sample.ids[None], **inputs).logits[0]


@torch.no_grad()
def compare_logits(ours, reference, name):
    """Return the largest relative difference of the logits, on text and on images."""
    if not isinstance(ours, VLM):
        return relative(ours(IDS), reference(input_ids=IDS).logits)
    samples, images = build_samples(ours)
    expected = [run_reference(reference, *pair, name) for pair in zip(samples, images, strict=True)]
    return max(relative(a, b) for a, b in zip(compute_logits(ours, samples, images), expected, strict=True))


def train_steps(model, name):
    """Train the adapters for two steps, so that A and B differ from their initial values."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.05)
    for _ in range(2):
        if isinstance(model, VLM):
            samples, images = build_samples(model)
            loss = sum(one.float().logsumexp(-1).square().mean() for one in compute_logits(model, samples, images))
        else:
            loss = torch.nn.functional.cross_entropy(model(IDS)[0, :-1], IDS[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_trained_adapter_has_the_logits_of_peft(checkpoints, tmp_path, name):
    peft = pytest.importorskip("peft")
    base = checkpoints(name)
    plain, ours = hub.load(base).float().eval(), hub.load(base).float().eval()
    train_steps(add_lora(ours, LoRAConfig(rank=3, alpha=6.0, target_modules=TARGETS[name])), name)
    peft_adapters.save_adapter(ours, tmp_path / "adapter", str(base), find_checkpoint(base).family.name)
    reference = load_reference(base)
    assert compare_logits(plain, reference, name) <= LOGITS
    assert compare_logits(ours, reference, name) > 0.01  # the adapter changes the logits
    adapted = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert peft.get_peft_model_state_dict(adapted).keys() == stored.keys()
    assert compare_logits(ours, adapted, name) <= LOGITS
    again = peft_adapters.load_adapter(plain, tmp_path / "adapter").eval()
    assert compare_logits(again, adapted, name) <= LOGITS
    assert compare_logits(merge_lora(again), adapted, name) <= LOGITS
    assert not any(isinstance(module, LoRALinear) for module in again.modules())


@pytest.mark.parametrize("name", list(TARGETS))
@pytest.mark.parametrize("patterns", [False, True])
def test_an_adapter_of_peft_has_equal_logits(checkpoints, tmp_path, name, patterns):
    peft = pytest.importorskip("peft")
    base = checkpoints(name)
    config = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": "all-linear"}
    if patterns:
        config |= {
            "rank_pattern": {"down_proj": 2, "layers.1.*": 3},
            "alpha_pattern": {"o_proj": 9},
            "use_rslora": True,
        }
    torch.manual_seed(1)
    adapted = peft.get_peft_model(load_reference(base), peft.LoraConfig(**config, task_type="CAUSAL_LM")).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    ours = hub.load(base).float().eval()
    assert compare_logits(ours, adapted, name) > 0.01
    peft_adapters.load_adapter(ours, tmp_path / "adapter").eval()
    assert compare_logits(ours, adapted, name) <= LOGITS
    assert all(p.requires_grad == (".lora." in key) for key, p in ours.named_parameters())


def test_wrong_adapters_are_refused_with_their_key(checkpoints, tmp_path):
    model = hub.load(checkpoints(LLAMA)).float()
    add_lora(model, LoRAConfig(rank=2, alpha=4.0, target_modules=("*.q", "*.down")))
    folder = tmp_path / "adapter"
    peft_adapters.save_adapter(model, folder, "some/base")
    with pytest.raises(ConfigError, match="already has LoRA"):
        peft_adapters.load_adapter(model, folder)
    settings, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    model, broken = hub.load(checkpoints(LLAMA)), shutil.copytree(folder, tmp_path / "broken")

    def refuse(match, key=None, changes=None, **config):
        (broken / "adapter_config.json").write_text(json.dumps(settings | config))
        save_file(
            {k: v for k, v in tensors.items() if k != key} | (changes or {}), broken / "adapter_model.safetensors"
        )
        with pytest.raises(CheckpointError, match=match):
            peft_adapters.load_adapter(model, broken)

    refuse("peft_type is 'IA3'", peft_type="IA3")
    refuse("use_dora is not supported", use_dora=True)
    refuse("modules_to_save is not supported", modules_to_save=["lm_head"])
    refuse("bias is not supported", bias="all")
    refuse("r is", r=0)
    refuse("other shapes", r=3)
    refuse("no pattern", rank_pattern={"(": 2})
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refuse("q_proj has lora_B only", name)
    refuse("q_proj has lora_A of shape .* other shapes", changes={name: torch.zeros(2, 7)})
    refuse("q_proj has NaN", changes={name: torch.full_like(tensors[name], torch.nan)})
    refuse("rotary of shape .* is no LoRA weight", changes={"model.rotary": torch.zeros(2, 2)})
    other = {name.replace("layers.0", "layers.9").replace("_A", half): torch.zeros(2, 2) for half in ("_A", "_B")}
    refuse(r"(?s)layers\.9\.self_attn\.q_proj is no linear layer.*some/base", changes=other)
    other = {name.replace("q_proj", "wqkv").replace("_A", half): torch.zeros(2, 2) for half in ("_A", "_B")}
    refuse("wqkv is no linear layer", changes=other)
    assert not lora_state_dict(model)  # a refused adapter changes nothing


def test_models_without_adapters_are_not_saved(checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match="no LoRA adapters"):
        peft_adapters.save_adapter(hub.load(checkpoints(LLAMA)), tmp_path)


def test_adapters_are_applied_by_load_and_merged_by_export(checkpoints, tmp_path):
    base = checkpoints(LLAMA)
    ours = train_steps(add_lora(hub.load(base).float(), LoRAConfig(rank=2, alpha=4.0, target_modules=("*.q",))), LLAMA)
    peft_adapters.save_adapter(ours.eval(), tmp_path / "adapter")
    pipeline = vitrail.load(base, adapter=tmp_path / "adapter", device="cpu", dtype=torch.float32)
    export_checkpoint(str(base), out=tmp_path / "merged", adapter=tmp_path / "adapter")
    with torch.no_grad():
        assert relative(pipeline.model(IDS), ours(IDS)) <= LOGITS
        assert relative(load_reference(tmp_path / "merged")(input_ids=IDS).logits, ours(IDS)) <= LOGITS
