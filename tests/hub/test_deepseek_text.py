"""DeepSeek-V2 and V3 besides parity (see `test_decoder_families`): released files, refused settings, and costs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import relative
from hub.test_decoder_families import BUILDERS, checkpoint
from hub.test_released_configs import RELEASED, write_files
from vitrail.errors import CheckpointError, VitrailError
from vitrail.hub import from_hf, load, to_hf
from vitrail.hub.checkpoint_info import read_config
from vitrail.lab.cost_ledger import compute_ledger

NAME = "deepseek-ai/DeepSeek-V3"


def test_quantized_weights_are_refused(tmp_path):
    write_files(NAME, tmp_path)
    with pytest.raises(CheckpointError, match="quant_method 'fp8'"):
        from_hf(tmp_path)
    assert read_config(tmp_path).layers == 61  # `vitrail ledger` reads no weights


def test_yarn_of_the_released_config_sharpens_scores(tmp_path):
    """The scale of the scores is 192^−½ · (0.1 · ln 40 + 1)², as published."""
    attention = read_config(write_files(NAME, tmp_path)).block.attention
    assert attention.query_pre_attn_scalar**-0.5 == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert attention.eps == 1e-6


def test_ledger_of_the_released_config(tmp_path):
    """Each token keeps 512 + 64 numbers in each of 61 layers; about 37 B parameters are active."""
    ledger = compute_ledger(read_config(write_files(NAME, tmp_path)), context_length=4096)
    assert ledger.parameters == 671_026_404_352
    assert ledger.cache_bytes[4096] == 4096 * 61 * (512 + 64) * 2
    assert 36.5e9 < ledger.active_parameters < 38e9


def test_layer_that_predicts_further_tokens_is_not_read(tmp_path):
    reference = checkpoint("deepseek_v3", 3, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {
        "model.layers.61.eh_proj.weight": torch.zeros(2),
        "model.layers.61.self_attn.o_proj.weight": torch.zeros(3),
    }
    save_file(tensors | further, tmp_path / "model.safetensors")
    ids = torch.randint(0, reference.config.vocab_size, (1, 7))
    assert relative(from_hf(tmp_path)(ids), reference(ids).logits) <= 1e-4
    save_file(tensors | {"model.layers.60.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.60\.eh_proj"):
        from_hf(tmp_path)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path):
    reference = checkpoint("deepseek_v3", 4, tmp_path / "k2")
    file = tmp_path / "k2/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    ours, ids = from_hf(tmp_path / "k2"), torch.randint(0, reference.config.vocab_size, (1, 9))
    assert relative(ours(ids), reference(ids).logits) <= 1e-4
    to_hf(ours, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "deepseek_v3"
    assert torch.equal(load(tmp_path / "back")(ids), ours(ids))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v3", {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "latent attention has the sizes"),
        ("deepseek_v3", {"q_lora_rank": "1536"}, "q_lora_rank"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "cannot rotate 3"),
        ("deepseek_v3", {"topk_method": "random"}, "topk_method 'random'"),
        ("deepseek_v3", {"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"n_group": 5, "n_routed_experts": 8}, "5 groups of 8 experts"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "'num_experts_per_tok' is missing"),
    ],
)
def test_unsupported_settings_raise(family, change, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BUILDERS[family](0)[0].to_dict() | change))
    with pytest.raises(VitrailError, match=message) as error:
        read_config(tmp_path)
    assert str(file) in error.value.problem


def test_released_fixture_is_whole():
    assert RELEASED[NAME]["config.json"]["num_nextn_predict_layers"] == 1  # the layer that is not read
