"""Videos shown to InternVL: the ids of its own processor, the logits and gradients of transformers' model, and what is
read of a file.

Their video processor resizes by torchvision: here their image processor makes each frame a tile. Which frames it picks
is held against ours in tests/processing/test_footage.py.
"""

import json

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import vitrail
from helpers import randomize, relative
from hub.test_blip2_internvl import GATED, SIZE, TILES_TOWER, VALUES, gradients, on_disk, pictures, same_gradients
from test_talker_video import FRAMES, RATE, write_clip
from vitrail import hub
from vitrail.cli import main
from vitrail.connectors.reduce import CellsConfig
from vitrail.data.video import open_video
from vitrail.errors import CheckpointError, ConfigError, TextError
from vitrail.hub.families import FAMILIES
from vitrail.processing.footage import FILE, Footage
from vitrail.processing.images import NORMS
from vitrail.processing.text import Tokenizer
from vitrail.stream import pack
from vitrail.talker import Video
from vitrail.talker.said import parts_of, place

SIDE, EACH = 12, 4  # pixels of a tile's side, and its tokens
SPECIALS = ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
SAID = ["user\nFrame1: what happens in the video?\nFrame2: assistant\na red ball rolls"]
NORM = {"image_mean": NORMS["imagenet"].mean, "image_std": NORMS["imagenet"].std}


class Frames:
    """In place of their video processor."""

    def __init__(self, images: GotOcr2ImageProcessorPil):
        self.images = images

    def __call__(self, videos, **how):
        made = [self.images(one, crop_to_patches=False, return_tensors="pt")["pixel_values"] for one in videos]
        alike = len({len(one) for one in made}) == 1
        return {"pixel_values_videos": torch.stack(made) if alike else made}  # (B, T, C, H, W)


def save(folder, *, video: bool = True, **more):
    """A random model of transformers. What stands for a video is no row of its decoder, as in the released ones."""
    words = Tokenizer.train(SAID * 3, 320, specials=SPECIALS, eos="<|im_end|>")
    text = T.Qwen2Config(**SIZE | GATED | {"vocab_size": words.size}, max_position_embeddings=600)
    vision = {**TILES_TOWER, "num_hidden_layers": 2, "image_size": [SIDE, SIDE]}
    ids = {"image_token_id": words.id("<IMG_CONTEXT>"), "eos_token_id": words.eos}
    config = T.InternVLConfig(vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)
    reference = randomize(T.InternVLForConditionalGeneration(config).eval(), 1)
    reference.save_pretrained(folder)
    if video:
        words.add_specials(["<video>"])
    words.save(folder)
    if more:
        (folder / FILE).write_text(json.dumps(more))
    return reference


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' model, a talker of its folder, and their processor."""
    folder = tmp_path_factory.mktemp("internvl")
    reference, talker = save(folder), vitrail.load(folder, device="cpu")
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokens = T.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=named)
    images = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, **NORM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
        processor = T.InternVLProcessor(images, tokens, Frames(images), image_seq_length=EACH)
    return reference, talker, processor


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4")


def movie(count: int, seed: int) -> list[Image.Image]:
    chance = np.random.default_rng(seed)
    return [Image.fromarray(chance.integers(0, 256, (31, 44, 3), dtype=np.uint8)) for _ in range(count)]


def video(frames) -> Video:
    return Video(frames, seconds=[n / 2 for n in range(len(frames))])


def theirs(processor, talker, turns, images, videos) -> tuple[list[int], torch.Tensor]:
    """The ids, and the pixels (V, C, H, W) in the order of what is shown: videos first, pictures behind them."""
    said = [{**one, "content": [place(part) for part in parts_of(one, "a turn")]} for one in turns]
    given = {"text": talker.template.render(said, generate=True), "images": images or None, "videos": videos}
    if len({len(one) for one in videos}) == 1:
        made = processor(**given, return_tensors="pt")
        return made["input_ids"][0].tolist(), made["pixel_values"]
    made = T.ProcessorMixin.__call__(processor, **given)  # InternVL's own call takes videos of one length alone
    assert not images
    return made["input_ids"][0], torch.cat(made["pixel_values_videos"])


SHOWN = {
    "one video": ([], [5]),
    "one frame": ([], [1]),
    "a video and a picture": ([(40, 90)], [3]),
    "two videos of unequal length": ([], [2, 11]),
    "two videos and two pictures": ([(33, 31), (20, 64)], [2, 2]),
}


@pytest.mark.parametrize("case", SHOWN)
def test_agrees(case, both):
    """Ids, pixels, logits, gradients."""
    reference, talker, processor = both
    sizes, counts = SHOWN[case]
    images, videos = pictures(*sizes), [movie(count, n) for n, count in enumerate(counts)]
    turns = [talker.turn([*map(video, videos), *images], "what happens in the video?")]
    ids, pixels = theirs(processor, talker, turns, images, videos)
    stream, stills, films = talker.prompt(turns)
    assert stream.ids.tolist() == ids and (stream.kinds == 2).sum() == EACH * sum(counts)
    assert [len(shape.views) for shape in films.shapes] == counts
    assert torch.equal(torch.cat([films.pixels, *([] if stills is None else [stills.pixels])]), pixels)

    logits = talker.model(pack([stream], len(stream)), stills, films)[0]
    expected = reference(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
    assert relative(logits, expected) <= VALUES
    weights = [torch.randn_like(expected)]
    mine = gradients([logits], weights, talker.model)
    same_gradients(reference, talker.model, mine, on_disk(reference, gradients([expected], weights, reference)))


@pytest.mark.parametrize(
    "question", ["what happens?", "Look: <video> and then?", "as in <IMG_CONTEXT> or\n<video>\nand <video>?"]
)
def test_words_around_a_video(question, both):
    """Where it stands in a question, the words before it are cut into tokens together with the number of its frame."""
    _, talker, processor = both
    images = pictures(*[(20, 20)] * question.count("<IMG_CONTEXT>"))
    videos = [movie(2, n) for n in range(max(1, question.count("<video>")))]
    turns = [
        talker.turn([*images, *map(video, videos)], question),
        {"role": "assistant", "content": "a ball"},
        talker.turn([], "and then?"),
    ]
    assert talker.prompt(turns).stream.ids.tolist() == theirs(processor, talker, turns, images, videos)[0]


def test_a_file_is_its_frames(both, clip):
    reference, talker, processor = both
    frames, seconds = open_video(clip).sample(fps=RATE)
    assert len(frames) == FRAMES and talker.model.config.films == Footage.usual("internvl", SIDE)
    chosen = [1, 3, 6, 9, 11, 14, 17, 19]  # the middles of eight parts of 21
    stills = [Image.fromarray(frames[n]) for n in chosen]
    turn = talker.turn(clip, "what happens?")
    stream, _, films = talker.prompt([turn])
    kept = talker.prompt([talker.turn(Video(stills, seconds=seconds[chosen]), "what happens?")])
    assert torch.equal(films.pixels, kept.videos.pixels) and torch.equal(stream.ids, kept.stream.ids)
    assert "\nFrame8: <img>" in talker.words.decode(stream.ids.tolist())
    ids, pixels = theirs(processor, talker, [turn], [], [stills])
    given = torch.tensor([ids])
    made = reference.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        pixel_values=pixels,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )[0, len(ids) :]
    said = talker.words.decode(made.tolist(), skip_specials=True).strip()
    assert talker.ask(clip, "what happens?", max_new=12) == said
    assert talker.ask([clip], "what happens?", max_new=12) != talker.ask([], "what happens?", max_new=12)
    for how, count in (({"frames": 3}, 3), ({"fps": 4.0}, 10), ({"fps": 0.1}, 1)):
        assert len(talker.prompt([talker.turn(clip, "what?", **how)]).videos.pixels) == count


def test_from_the_command_line(clip, tmp_path, capsys, monkeypatch):
    save(tmp_path, num_frames=3)
    talker = vitrail.load(tmp_path, device="cpu")
    given = [clip, "what happens?", "--model", str(tmp_path), "--device", "cpu", "--max-new", "5"]
    monkeypatch.setattr("sys.argv", ["vitrail", "ask", *given])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert capsys.readouterr().out == talker.ask(clip, "what happens?", frames=3, max_new=5) + "\n"


def test_what_files_say_goes_from_folder_to_folder(tmp_path):
    save(tmp_path / "theirs", num_frames=5, size={"height": SIDE, "width": SIDE}, fps=None, initial_shift=True)
    model, words = hub.load(tmp_path / "theirs"), hub.tokenizer(tmp_path / "theirs")
    assert model.config.footage == Footage.usual("internvl", SIDE).with_(frames=5)
    hub.save(model, tmp_path / "ours", words)
    hub.to_hf(hub.load(tmp_path / "ours"), tmp_path / "again", tokenizer=words)
    for name in ("ours", "again"):
        assert hub.load(tmp_path / name).config.footage == model.config.footage
    assert FAMILIES["internvl"].fits(model.config)
    told = json.loads((tmp_path / "again" / FILE).read_text())
    assert told["video_processor_type"] == "InternVLVideoProcessor" and told["size"] == {"height": SIDE, "width": SIDE}
    assert (told["num_frames"], told["do_sample_frames"]) == (5, True) and "crop_to_patches" not in told
    assert told["image_mean"] == list(NORM["image_mean"])
    for wrong, says in (
        ({"size": {"height": 24, "width": 24}}, "frames of 24 pixels, and tiles of 12"),
        ({"size": {"height": 24, "width": 12}}, "only square"),
        ({"initial_shift": 1}, "initial_shift is 1"),
        ({"num_frames": 0}, "frames is 0"),
        ({"num_frames": "all"}, "frames is 'all'"),
    ):
        (tmp_path / "again" / FILE).write_text(json.dumps(wrong))
        with pytest.raises((ConfigError, CheckpointError), match=says) as caught:
            hub.load(tmp_path / "again")
        assert FILE in caught.value.problem


def test_what_cannot_be_is_refused(both, clip, tmp_path):
    _, talker, _ = both
    with pytest.raises(ConfigError, match=r"clip\.mp4: 22 frames of a video that has 21"):
        talker.ask(clip, "what?", frames=22)
    with pytest.raises(ConfigError, match=f"{EACH * 8 * 18} of them for pictures and videos"):
        talker.ask([clip] * 18, "what?")
    with pytest.raises(TextError, match=r"1 places .* shown is image"):
        talker.ask(pictures((9, 9)), "what is <video>?")
    with pytest.raises(ConfigError, match="footage by 'qwen2-vl' for a tower that reads 'internvl'"):
        talker.model.config.with_(footage=Footage.usual("qwen2-vl", 28))
    save(tmp_path, video=False)
    with pytest.raises(ConfigError, match="this internvl reads videos, and its tokenizer has no word") as caught:
        vitrail.load(tmp_path, device="cpu").ask(clip, "what?")
    assert "<video>" in caught.value.remedy


def test_fewer_tokens_of_each_frame(both, clip):
    talker = both[1].reduced(CellsConfig(keep=4))  # 2 × 2 features, which become one
    stream, _, videos = talker.prompt([talker.turn(clip, "what happens?")])
    assert (stream.kinds == 2).sum() == len(videos.pixels) == 8
    assert isinstance(talker.ask(clip, "what happens?", max_new=3), str)


def test_tokens_that_stand_for_pictures_stand_for_no_video(both):
    config = both[1].model.config
    assert config.with_(voco=2).films is None
    with pytest.raises(ConfigError, match="reads no videos"):
        config.with_(voco=2, footage=config.films)
