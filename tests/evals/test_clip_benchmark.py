"""The suite on clips: scores by kind, number of frames and context extension, and baselines."""

import pytest
import torch

from tasks.test_video_qa_task import make_task, make_tokenizer
from vitrail.backbones.context_extension import extend_context, use_extended_context
from vitrail.data.clips.clip_source import ClipLayout, ClipSource, ClipSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.suites.clip_benchmark import (
    ClipAnswers,
    ClipModel,
    evaluate_clips,
    is_near,
    measure_clip_baselines,
    score_clip_answers,
)
from vitrail.nn.rotary_embedding import RotaryEmbedding, YaRNScaling


def test_scores_by_kind_frames_and_extension():
    tokenizer = make_tokenizer()
    task = make_task("interleaved", tokenizer)
    source = ClipSource(ClipSourceConfig(num_frames=(8, 40), fps=(1.0, 2.0), split="test"))
    model = ClipModel(task.model, task.chat_tokenizer, task.chat_format)
    scores = evaluate_clips(model, source, 6, ("none", "yarn"), trained_frames=8)
    cells = {(score.subset["frames"], score.subset["context"]) for score in scores}
    assert cells == {(8, "none"), (40, "none"), (40, "yarn")}
    counts = {score.name: score.count for score in scores if score.subset == {"frames": 8, "context": "none"}}
    assert counts["shapes"] == 6 and sum(counts.values()) - counts["when, near"] == 30
    assert all(score.value == 0 or score.count for score in scores)
    with pytest.raises(ConfigError, match="1 clips for 2 rates"):
        evaluate_clips(model, source, 1)


def test_accuracy_and_near_times():
    layout = ClipLayout(20, 2.0)  # ten seconds, so one second is near
    answers = ClipAnswers(
        layout,
        ["when", "when", "when", "order"],
        [""] * 4,
        ["3.0 seconds", "4.0 seconds", "soon", "the ring moves"],
        ["3.0 seconds", "5.0 seconds", "1.0 seconds", "the ring turns red"],
    )
    scores = {score.name: score for score in score_clip_answers([answers], {"when": {"blind": 0.5}}, {})}
    assert (scores["when"].value, scores["when, near"].value, scores["order"].value) == (1 / 3, 2 / 3, 0)
    assert scores["when"].baselines == {"blind": 0.5}
    assert is_near("4.0 seconds", "5.0 seconds", layout) and not is_near("3.9 seconds", "5.0 seconds", layout)


def test_baselines_of_a_clip_without_clues():
    source = ClipSource(ClipSourceConfig(split="test"))
    found = measure_clip_baselines(source, [ClipLayout(32, 2.0)])
    assert found["order"]["blind"] < 0.1 and found["needle"]["majority"] < 0.1
    assert found["part"]["blind"] < 0.5 and found["when"]["blind"] < 0.15
    assert 0.3 < found["count"]["majority"] < 0.5  # "never" is a third of the answers


def test_context_extension_changes_the_rotary_embedding_and_restores_it():
    decoder = make_task("interleaved", make_tokenizer()).model.decoder
    config = decoder.config
    yarn = extend_context(config, 4 * config.context_length)
    assert yarn.context_length == 4 * config.context_length
    assert yarn.rotary.scaling == YaRNScaling(factor=4.0, original_length=config.context_length)
    base = extend_context(config, 1600, "base", trained_length=100)
    plain, ntk = (RotaryEmbedding(extend_context(config, 1600, one, 100).rotary).frequency for one in ("none", "ntk"))
    torch.testing.assert_close(ntk, RotaryEmbedding(base.rotary).frequency)  # NTK's scaling is a larger base
    assert torch.isclose(ntk[-1], plain[-1] / 16) and torch.isclose(ntk[0], plain[0])
    assert extend_context(config, 50, "yarn", 100).rotary == config.rotary
    rotary = decoder.rotary
    with use_extended_context(decoder, 800, "yarn", 100):
        assert decoder.config.rotary.scaling is not None
        assert not torch.equal(decoder.rotary.frequency, rotary.frequency)
    assert decoder.rotary is rotary and decoder.config == config
    with pytest.raises(ConfigError, match="already has YaRNScaling"):
        extend_context(yarn, 10**6)
    with pytest.raises(ConfigError, match="there is no context extension"):
        extend_context(config, 10**6, "more")  # type: ignore[arg-type]
