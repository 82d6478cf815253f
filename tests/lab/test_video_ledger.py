"""The cost of long videos: it agrees with the cost ledger and with arithmetic."""

import json

import pytest
import torch

from vitrail.backbones.decoder import Decoder
from vitrail.cli.ledger_command import print_ledger
from vitrail.errors import ConfigError
from vitrail.lab.cost_ledger import get_preset
from vitrail.lab.video_ledger import QUESTION_TOKENS, TIMESTAMP_TOKENS, compute_video_ledger
from vitrail.nn import Workload, cost


def test_videos_fill_the_context():
    ledger = compute_video_ledger("qwen2.5-vl-3b", frame_size=(364, 644), context_lengths=(8192, 32768))
    grid_tokens = 13 * 23  # 364 × 644 pixels in tokens of 28 × 28
    for one in ledger.costs:
        assert one.num_frames == 2 * ((one.context_length - QUESTION_TOKENS) // grid_tokens)
        assert one.tokens == one.num_frames // 2 * grid_tokens + QUESTION_TOKENS <= one.context_length
        assert one.seconds == one.num_frames / 2
    small, large = ledger.costs
    assert large.flops["tower"] / small.flops["tower"] == large.num_frames / small.num_frames  # frames are independent
    config = get_preset("qwen2.5-vl-3b")
    with torch.device("meta"):
        decoder = Decoder(config.decoder)
    assert small.flops["decoder"] == cost.count_flops(decoder, Workload.prefill(small.tokens))
    head = config.decoder.block.attention.resolve_head_dim(config.decoder.block.width)
    per_token = 2 * 2 * config.decoder.layers * config.decoder.block.attention.num_kv_heads * head
    assert small.cache_bytes == per_token * small.tokens


def test_text_timestamps_take_tokens_of_the_context():
    costs = compute_video_ledger("qwen3-vl-2b", context_lengths=(8192,)).costs
    assert costs[0].frame_tokens == (15 * 20 + TIMESTAMP_TOKENS) / 2  # 480 × 640 pixels in tokens of 32 × 32
    assert compute_video_ledger("llava-next-video-7b", context_lengths=(8192,)).costs[0].frame_tokens == 144


def test_command_prints_and_saves_the_table(capsys, tmp_path):
    print_ledger(["qwen2-vl-2b"], video=True, image_size="640x360", fps=1.0, device=["h100"], json=tmp_path / "v.json")
    text = capsys.readouterr().out
    assert "qwen2-vl-2b, h100" in text and "first token" in text and "640 × 360 pixels at 1 frames/s" in text
    [ledger] = json.loads((tmp_path / "v.json").read_text())["videos"]
    assert [one["context_length"] for one in ledger["costs"]] == [8192, 32768, 262144]


def test_models_without_videos_and_short_contexts_are_refused():
    with pytest.raises(ConfigError, match="takes no videos"):
        compute_video_ledger("llava-1.5-7b")
    with pytest.raises(ConfigError, match="do not fit a context of 100"):
        compute_video_ledger("qwen2-vl-2b", context_lengths=(100,))
    with pytest.raises(ConfigError, match="--video needs a model"):
        print_ledger(video=True)
    with pytest.raises(ConfigError, match="add --video"):
        print_ledger(["qwen2-vl-2b"], fps=1.0)
