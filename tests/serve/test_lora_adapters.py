"""A request with a LoRA adapter gets the answer of the model with the adapter merged into its weights."""

import json
import shutil

import httpx2 as httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from hub.shrunk_checkpoints import write_checkpoint
from vitrail.errors import CheckpointError, ConfigError
from vitrail.pipelines import load
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server_process import open_server

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
RANK, ALPHA = 3, 6.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, a PEFT adapter of it, and the checkpoint with the adapter merged."""
    root = tmp_path_factory.mktemp("lora")
    base = write_checkpoint("meta-llama/Llama-3.2-1B-Instruct", root / "base")
    merged, adapter = shutil.copytree(base, root / "merged"), root / "adapter"
    adapter.mkdir()
    (file,) = merged.glob("*.safetensors")
    weights, factors = load_file(file), {}
    for key in list(weights):
        if any(key.endswith(f"{module}.weight") for module in MODULES):
            out_size, in_size = weights[key].shape
            a, b = torch.randn(RANK, in_size) * 0.2, torch.randn(out_size, RANK) * 0.2
            weights[key] += (b @ a * ALPHA / RANK).to(weights[key])
            name = "base_model.model." + key.removesuffix(".weight")
            factors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(weights, file, {"format": "pt"})
    save_file(factors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return base, adapter, merged


def test_requests_with_and_without_an_adapter_share_passes(folders):
    base, adapter, merged = folders
    engines = [
        Engine(load(folder).model, EngineConfig(page_size=4, max_batched_tokens=16)) for folder in (base, merged)
    ]
    prompts = [[5, 6, 7, 8, 9, 10], [3] * 9, [5, 6, 7, 8, 9, 11], [1]]
    plain = SamplingParams(max_new_tokens=10)
    alone, expected = (engine.generate([EnginePrompt(ids) for ids in prompts], plain) for engine in engines)
    assert [one.ids for one in alone] != [one.ids for one in expected]
    engine = engines[0]
    engine.adapters.load("pirate", adapter)
    mixed = engine.generate(
        [EnginePrompt(ids) for ids in prompts * 2], [plain] * 4 + [plain.replace(adapter="pirate")] * 4
    )
    assert [one.ids for one in mixed] == [one.ids for one in alone] + [one.ids for one in expected]


def test_wrong_adapters_are_refused(folders, tmp_path):
    base, adapter, _ = folders
    engine = Engine(load(base).model)
    with pytest.raises(CheckpointError, match="no adapter_config"):
        engine.adapters.load("none", tmp_path)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    broken = shutil.copytree(adapter, tmp_path / "broken")
    for change, match in (
        ({"use_dora": True}, "use_dora"),
        ({"r": 4}, "shapes"),
        ({"r": "x"}, "r"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ):
        (broken / "adapter_config.json").write_text(json.dumps(settings | change))
        with pytest.raises(CheckpointError, match=match):
            engine.adapters.load("broken", broken)
    (broken / "adapter_config.json").write_text(json.dumps(settings))
    for name in ("vision_tower.blocks.0.attn.qkv", "model.layers.99.self_attn.q_proj", "model.layers.0.mlp.router"):
        save_file({f"{name}.lora_A.weight": torch.zeros(RANK, 4)}, broken / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match="layer"):
            engine.adapters.load("broken", broken)
    engine.adapters.load("pirate", adapter)
    with pytest.raises(ConfigError, match="two adapters"):
        engine.adapters.load("pirate", adapter)


def test_the_server_selects_adapters_by_model_name(folders):
    base, adapter, merged = folders
    model = ServedModel("base", load(base), adapters={"pirate": adapter})
    asked = {"prompt": "USER: what is this?", "max_tokens": 12}
    with open_server(model) as url, httpx.Client(base_url=url, timeout=300) as client:
        assert [one["id"] for one in client.get("/models").json()["data"]] == ["base", "pirate"]
        for name, folder in (("base", base), ("pirate", merged)):
            answer = client.post("/completions", json={"model": name, **asked}).json()
            assert answer["choices"][0]["text"] == load(folder).generate(asked["prompt"], max_new_tokens=12)
