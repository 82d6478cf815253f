"""Videos shown to SmolVLM: sampling, prompts and logits of transformers.

The video processor of transformers needs torchvision. Here its image processor makes each frame a tile.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers as T
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

import vitrail
from helpers import randomize, relative
from hub.test_internvl_video import movie
from hub.vlm_parity import VALUES
from vitrail import hub
from vitrail.hub.checkpoint_info import read_config
from vitrail.pipelines import Video
from vitrail.processing.tokenizer import Tokenizer
from vitrail.processing.video_sampling import VIDEO_PROCESSOR_FILE, VideoSamplingConfig
from vitrail.registry import FAMILIES
from vitrail.stream import pack_streams
from vitrail.stream.timestamps import format_number_words

SPECIALS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SAID = ["User: You are provided the following series of frames from a video.\n\nFrame from 00:00:\n\nWhat happens?"]
SIDE = 20
WORDS = {
    0: "zero",
    1: "one",
    13: "thirteen",
    20: "twenty",
    64: "sixty-four",
    100: "one hundred",
    112: "one hundred and twelve",
    1000: "one thousand",
    1001: "one thousand and one",
    2345: "two thousand, three hundred and forty-five",
    99_999: "ninety-nine thousand, nine hundred and ninety-nine",
    100_000: "one hundred thousand",
}  # of the package num2words, which the processor of transformers needs


def test_numbers_in_words():
    assert {number: format_number_words(number) for number in WORDS} == WORDS


@pytest.mark.parametrize("max_frames", [4, 64])
@pytest.mark.parametrize("fps", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("total", "rate"), [(1, 30.0), (7, 2.0), (90, 30.0), (300, 25.0), (1000, 10.0), (9000, 24.0)])
def test_sampling_matches_transformers(total, rate, fps, max_frames):
    metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    theirs = SmolVLMVideoProcessor.sample_frames(SimpleNamespace(num_frames=max_frames, fps=fps), metadata)
    sampling = VideoSamplingConfig.default("smolvlm", 20).replace(fps=fps, max_frames=max_frames)
    assert sampling.sample_frame_indices(total, total / rate) == theirs.tolist()


def make_config(words: Tokenizer, **more):
    about = {
        "text_config": {"model_type": "llama", "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "vocab_size": words.vocab_size, "max_position_embeddings": 2000},
        "vision_config": {"hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": SIDE, "patch_size": 5},
        "image_token_id": words.token_to_id("<image>"),
    }
    return FAMILIES["smolvlm"].from_hf_config(about | more)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    words = Tokenizer.train(SAID * 3, 400, special_tokens=SPECIALS, bos="<|im_start|>", eos="</s>")
    family, folder = FAMILIES["smolvlm"], tmp_path_factory.mktemp("smolvlm")
    hub.to_hf(randomize(family.model_class(make_config(words)).eval(), spread=0.3), folder, tokenizer=words)
    # The chat template of the first SmolVLM has no place for a video.
    template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE.replace("{% elif line['type'] == 'video' %}{{ '<video>' }}", "")
    (folder / "chat_template.jinja").write_text(template)
    return vitrail.load(folder, device="cpu"), folder


@pytest.mark.parametrize("ask", ["What happens?", "\n what?", ""])
@pytest.mark.parametrize("count", [1, 3])
def test_prompts_and_logits_match_transformers(count, ask, pipeline, monkeypatch):
    chat_pipeline, folder = pipeline
    images, times = movie(count, 0), [61.5 * n for n in range(count)]
    content = [{"type": "video", "video": Video(images, timestamps=times)}] + [{"type": "text", "text": ask}] * bool(
        ask
    )
    prompt = chat_pipeline.build_prompt([{"role": "user", "content": content}])

    processor = object.__new__(T.SmolVLMProcessor)
    processor.fake_image_token, processor.global_image_token = "<fake_token_around_image>", "<global-img>"
    processor.image_token, processor.image_seq_len = "<image>", 4
    monkeypatch.setattr(processing_smolvlm, "num2words", WORDS.get if count == 1 else {3: "three"}.get)
    duration = 61.5 * count if count > 1 else 1.0
    metadata = SimpleNamespace(fps=1.0, timestamps=times, duration=duration)
    frames = SmolVLMImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )([images], return_tensors="pt")
    given = {"pixel_values": frames["pixel_values"], "video_metadata": [metadata]}
    text = f"<|im_start|>User: {processor.replace_video_token(given, 0)}{ask}<end_of_utterance>\nAssistant:"
    assert prompt.stream.ids.tolist() == chat_pipeline.tokenizer.encode(text)
    torch.testing.assert_close(prompt.videos.pixels, frames["pixel_values"][0], rtol=0, atol=1e-6)

    reference = T.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        ours = chat_pipeline.model(pack_streams([prompt.stream], len(prompt.stream)), None, prompt.videos)[0]
        expected = reference(input_ids=prompt.stream.ids[None], pixel_values=frames["pixel_values"]).logits[0]
    assert relative(ours, expected) <= VALUES


def test_settings_of_older_and_newer_files(pipeline, tmp_path):
    chat_pipeline, folder = pipeline
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    sampling = {"fps": 2, "max_frames": 50, "video_size": {"longest_edge": 40}}
    older = json.loads((folder / "preprocessor_config.json").read_text()) | {"video_sampling": sampling}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    found = read_config(tmp_path).resolved_video_sampling
    assert (found.fps, found.max_frames, found.longest_edge, found.square_size) == (2, 50, 40, SIDE)
    newer = {"fps": 3, "num_frames": 9, "size": {"longest_edge": 30}, "max_image_size": {"longest_edge": SIDE}}
    (tmp_path / VIDEO_PROCESSOR_FILE).write_text(json.dumps(newer))
    found = read_config(tmp_path).resolved_video_sampling
    assert (found.fps, found.max_frames, found.longest_edge) == (3, 9, 30)
    assert json.loads((folder / VIDEO_PROCESSOR_FILE).read_text())["size"] == {"longest_edge": SIDE}
    assert chat_pipeline.model.config.video_sampling is None
