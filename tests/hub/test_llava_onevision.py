"""LLaVA-OneVision against transformers on random checkpoints of odd shapes: pictures, videos, both, neither."""

import json

import pytest
import torch
import transformers as T
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import vitrail
from helpers import randomize, relative
from hub.test_blip2_internvl import VALUES, gradients, on_disk, same_gradients
from hub.test_internvl_video import movie
from hub.test_llava import pictures
from test_talker_video import FRAMES, RATE, write_clip
from vitrail import hub
from vitrail.cli import main
from vitrail.connectors.reduce import CellsConfig
from vitrail.data.video import open_video
from vitrail.errors import ConfigError, VitrailError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.hub.families import FAMILIES
from vitrail.hub.llava import whole_spelt
from vitrail.models.videos import watch
from vitrail.processing.anyres import GRIDS_ONEVISION, AnyRes
from vitrail.processing.footage import FILE, Footage
from vitrail.processing.text import Tokenizer
from vitrail.stream import build, pack, split, video, words
from vitrail.talker import Video
from vitrail.talker.said import parts_of, place

IMAGE, VIDEO = 98, 97
SIZE = {"hidden_size": 30, "intermediate_size": 47, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 99}
TOWER = {"hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 2}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 32]]
FAMILY = FAMILIES["llava_onevision"]


def onevision(text=None, vision=None, **more):
    text = text or T.Qwen2Config(**SIZE, num_key_value_heads=1)
    vision = vision or T.SiglipVisionConfig(**TOWER, image_size=32, patch_size=6, vision_use_head=False)  # 5 × 5
    usual = {"image_token_index": IMAGE, "video_token_index": VIDEO, "image_grid_pinpoints": PINPOINTS}
    config = T.LlavaOnevisionConfig(vision_config=vision, text_config=text, **usual | more)
    return randomize(T.LlavaOnevisionForConditionalGeneration(config).eval(), spread=0.1)


CASES = {
    "siglip": lambda: onevision(),
    "shrunk to two tiles": lambda: onevision(
        vision_aspect_ratio="anyres_max_2", vision_feature_layer=-2, projector_hidden_act="relu"
    ),
    "clip, without CLS": lambda: onevision(
        vision=T.CLIPVisionConfig(**TOWER, image_size=32, patch_size=8),
        vision_feature_select_strategy="default",
        multimodal_projector_bias=False,
        text=T.LlamaConfig(**SIZE),
        vision_aspect_ratio="anyres_max_1",
    ),
    "tied": lambda: onevision(text=T.Qwen2Config(**SIZE, num_key_value_heads=1, tie_word_embeddings=True)),
}


def filmed(ours, *counts):
    """Videos of so many frames."""
    if not counts:
        return None
    frames = [Video(movie(n, seed), seconds=list(range(n))) for seed, n in enumerate(counts)]
    return ours.filmed([watch(one, ours.config).pixels for one in frames])


def theirs(reference, sample, shown, films):
    """A sample by itself, as transformers takes it."""
    given = {}
    if shown is not None:
        views = shown.pixels.split([len(shape.views) for shape in shown.shapes])
        given["pixel_values"] = torch.nn.utils.rnn.pad_sequence(views, batch_first=True)
        given["image_sizes"] = torch.tensor([[shape.height, shape.width] for shape in shown.shapes])
    if films is not None:
        given["pixel_values_videos"] = films.pixels.unflatten(0, (len(films.shapes), -1))
    ids = torch.where(sample.kinds == 2, VIDEO, sample.ids)
    return reference(input_ids=ids[None], **given).logits[0]


SHOWN = {  # sizes of pictures, frames of videos
    "words alone": ((), ()),
    "a picture": (((40, 90),), ()),
    "pictures of unequal sizes": (((33, 31), (64, 20), (100, 7)), ()),
    "a video": ((), (5,)),
    "one frame": ((), (1,)),
    "two pictures and two videos": (((20, 64), (91, 90)), (3, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees(case, tmp_path):
    agrees(CASES[case](), tmp_path)


def agrees(reference, folder):
    """Logits of every sample, and the gradients of all of them, packed in one row here, each by itself there."""
    reference.save_pretrained(folder)
    ours = from_hf(folder).eval()
    every, samples, expected = [], [], []
    for sizes, counts in SHOWN.values():
        shown, films = ours.prepare(pictures(*sizes)) if sizes else None, filmed(ours, *counts)
        parts = [words([1, 5])]
        for shape in [] if shown is None else shown.shapes:
            parts += [ours.config.part(shape), words([7, 8])]
        for shape in [] if films is None else films.shapes:
            parts += [ours.config.clip(shape), words([9])]
        samples.append(build([*parts, words([3])], ours.config.rules))
        every.append((shown, films))
        expected.append(theirs(reference, samples[-1], shown, films))
    batch = pack(samples, sum(map(len, samples)))
    stills, clips = (_together([one[n] for one in every if one[n] is not None]) for n in (0, 1))
    logits = split(batch, ours(batch, stills, clips))
    for a, b in zip(logits, expected, strict=True):
        assert relative(a, b) <= VALUES
    weights = [torch.randn_like(b) for b in expected]
    mine = gradients(logits, weights, ours)
    same_gradients(reference, ours, mine, on_disk(reference, gradients(expected, weights, reference)))


def _together(shown):
    return shown[0]._replace(
        pixels=torch.cat([one.pixels for one in shown]), shapes=tuple(s for one in shown for s in one.shapes)
    )


@pytest.mark.parametrize("case", CASES)
def test_comes_back(case, tmp_path):
    comes_back(CASES[case](), tmp_path, "llava_onevision")


def comes_back(reference, folder, name):
    reference.save_pretrained(folder / "hf")
    ours = from_hf(folder / "hf")
    others = {"llava_next", "llava_next_video", "llava_onevision"} - {name}
    assert FAMILIES[name].fits(ours.config) and not any(FAMILIES[other].fits(ours.config) for other in others)
    to_hf(ours, folder / "back")
    assert whole_spelt(from_hf(folder / "back").config) == whole_spelt(ours.config)
    back = T.AutoModelForImageTextToText.from_pretrained(folder / "back").eval()
    assert type(back) is type(reference)
    a, b = reference.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    shown, films = ours.prepare(pictures((91, 90))), filmed(ours, 3)
    parts = [words([1]), ours.config.part(shown.shapes[0]), ours.config.clip(films.shapes[0]), words([2])]
    sample = build(parts, ours.config.rules)
    assert torch.equal(*(theirs(model, sample, shown, films) for model in (reference, back)))
    save(ours, folder / "own")
    again = load(folder / "own")
    assert again.config == ours.config and again.config.films.rule == name.replace("_", "-")


def test_what_a_config_leaves_out_is_as_released():
    """transformers' own defaults: SigLIP-so400m without its last block, 27 × 27 patches, up to 6 × 6 tiles."""
    plain = T.LlavaOnevisionConfig()
    ours = FAMILY.read({"model_type": "llava_onevision", "text_config": T.Qwen2Config().to_dict()})
    whole = FAMILY.read(plain.to_dict())
    assert ours == whole and ours.policy == AnyRes(tile=384, unread=6, grids=GRIDS_ONEVISION, max_tiles=9)
    assert (ours.tower.side, ours.tower.layers, ours.layer, ours.rules.fill) == (27, 26, -1, 151_646)
    film = ours.policy.film(7)
    assert film.tokens == 7 * 14 * 14 + 1 == ours.tokens(film) == ours.clip(film).tokens


@given(frames=st.integers(1, 9), side=st.integers(1, 9), patch=st.integers(1, 5), data=st.data())
def test_tokens_of_a_video(frames, side, patch, data):
    """As many as their processor writes, one newline at the end of them, and every frame read once."""
    unread = data.draw(st.integers(0, patch - 1))
    policy = AnyRes(tile=side * patch + unread, patch=patch, unread=unread, grids=((1, 1),), max_tiles=1)
    cut, processor = policy.film(frames), object.__new__(T.LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.video_token = side**2, "v"
    seen = {"pixel_values_videos": torch.empty(1, frames, 3, 1, 1)}
    assert cut.tokens == len(processor.replace_video_token(seen, 0))
    assert [span.first for span in cut.spans] == list(range(frames)) and len(cut.views) == frames
    newlines = video(cut).newlines()
    assert newlines[-1] and newlines.sum() == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad'"),
        ({"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio is 'anyres'"),
        ({"vision_aspect_ratio": "anyres_max_0"}, "max_tiles is 0"),
        ({"vision_feature_layer": [-2, -5]}, "several layers"),
        ({"vision_feature_select_strategy": "default"}, "would drop a patch"),
        ({"vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 32, "patch_size": 8}}, "CLS"),
        ({"image_grid_pinpoints": [[32, 65]]}, "whole number of tiles"),
        ({"video_token_index": "x"}, "marks"),
    ],
)
def test_what_is_not_built_is_refused(change, says, tmp_path):
    onevision().save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(VitrailError, match=says):
        from_hf(tmp_path)


# ── asked ──────────────────────────────────────────────────────────────────────────────────────────────────────

SPECIALS = ["<|im_start|>", "<|im_end|>", "<image>", "<video>"]
SAID = ["user\nwhat happens in the video? assistant\na red ball rolls"]
SIDE = 32


class Frames:
    """In place of their video processor, which resizes by torchvision: a SigLIP processor squashes each frame."""

    def __call__(self, videos, **how):
        one = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=3)
        return {"pixel_values_videos": torch.stack([one(v, return_tensors="pt")["pixel_values"] for v in videos])}


def written(folder, **said):
    """A random model of transformers, its tokenizer, and what is `said` of its videos."""
    tokens = Tokenizer.train(SAID * 3, 320, specials=SPECIALS, eos="<|im_end|>")
    text = T.Qwen2Config(**SIZE | {"vocab_size": tokens.size}, num_key_value_heads=1, max_position_embeddings=900)
    return keep_both(onevision, text, tokens, folder, said)


def keep_both(make, text, tokens, folder, said):
    ids = {f"{mark}_token_index": tokens.id(f"<{mark}>") for mark in ("image", "video")}
    reference = make(text=text, **ids, eos_token_id=tokens.eos)
    reference.save_pretrained(folder)
    tokens.save(folder)
    if said:
        (folder / FILE).write_text(json.dumps(said))
    return reference


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' model, a talker of its folder, and the processor that an export is opened with."""
    folder = tmp_path_factory.mktemp("onevision")
    reference, talker = written(folder / "theirs"), vitrail.load(folder / "theirs", device="cpu")
    to_hf(talker.model, folder / "ours", tokenizer=talker.words)
    told = json.loads((folder / "ours" / "processor_config.json").read_text())
    assert told.pop("processor_class") == "LlavaOnevisionProcessor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
        parts = [part.from_pretrained(folder / "ours") for part in (T.AutoImageProcessor, T.AutoTokenizer)]
        processor = T.LlavaOnevisionProcessor(*parts, Frames(), **told)
    return reference, talker, processor


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4")


def inputs(processor, talker, turns, images, videos):
    """Theirs. Pictures are given side by side: of those in a list of a prompt's own they make one view each."""
    said = [{**one, "content": [place(part) for part in parts_of(one, "a turn")]} for one in turns]
    text = talker.template.render(said, generate=True)
    shown = {"images": images or None, "videos": videos or None}
    return processor(text=text, **shown, return_tensors="pt", add_special_tokens=False)  # the template wrote them


def check_asked(case, reference, talker, processor):
    """Ids, pixels and greedy answers are theirs."""
    sizes, counts = SHOWN[case]
    images, videos = pictures(*sizes), [movie(count, n) for n, count in enumerate(counts)]
    films = [Video(frames, seconds=list(range(len(frames)))) for frames in videos]
    turns = [talker.turn([*images, *films], "what happens in the video?")]
    given = inputs(processor, talker, turns, images, videos)
    stream, stills, seen = talker.prompt(turns)
    ids = torch.where(stream.kinds == 2, talker.marks["video"], stream.ids)
    assert ids.tolist() == given["input_ids"][0].tolist()
    if images:
        views = stills.pixels.split([len(shape.views) for shape in stills.shapes])
        for mine, other in zip(views, given["pixel_values"], strict=True):
            assert torch.equal(mine, other[: len(mine)]) and not other[len(mine) :].any()
    if videos:
        assert torch.equal(seen.pixels, given["pixel_values_videos"].flatten(0, 1))
    logits = talker.model(pack([stream], len(stream)), stills, seen)[0]
    assert relative(logits, reference(**given).logits[0]) <= VALUES
    made = reference.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    said = talker.words.decode(made.tolist(), skip_specials=True).strip()
    assert talker.chat(turns, max_new=8) == said


@pytest.mark.parametrize("case", SHOWN)
def test_ids_pixels_and_answers_are_theirs(case, both):
    check_asked(case, *both)


def test_a_file_is_its_frames(both, clip):
    _, talker, _ = both
    frames, seconds = open_video(clip).sample(fps=RATE)
    stills = Video([Image.fromarray(frame) for frame in frames], seconds=seconds)
    whole, kept = (talker.prompt([talker.turn(one, "what?")]) for one in (clip, stills))
    assert len(whole.videos.pixels) == FRAMES and torch.equal(whole.videos.pixels, kept.videos.pixels)  # 32 at most
    few = talker.prompt([talker.turn(clip, "what?", frames=4)])
    assert torch.equal(few.videos.pixels, whole.videos.pixels[[0, 5, 10, 15]])
    assert (few.stream.kinds == 2).sum() == 4 * 3 * 3 + 1
    assert talker.ask(clip, "what?", max_new=8) != talker.ask([], "what?", max_new=8)


def test_from_the_command_line(clip, tmp_path, capsys, monkeypatch):
    written(tmp_path, num_frames=3, size={"height": SIDE, "width": SIDE})
    talker = vitrail.load(tmp_path, device="cpu")
    assert talker.model.config.films.frames == 3
    photo = tmp_path / "photo.png"
    pictures((40, 90))[0].save(photo)
    for shown in (clip, str(photo)):
        given = [shown, "what happens?", "--model", str(tmp_path), "--device", "cpu", "--max-new", "5"]
        monkeypatch.setattr("sys.argv", ["vitrail", "ask", *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        assert capsys.readouterr().out == talker.ask(shown, "what happens?", max_new=5) + "\n"


def test_what_files_say_of_videos(tmp_path):
    written(tmp_path / "theirs", num_frames=5)
    model, tokens = load(tmp_path / "theirs"), hub.tokenizer(tmp_path / "theirs")
    assert model.config.footage == Footage.usual("llava-onevision", SIDE).with_(frames=5)
    to_hf(model, tmp_path / "again", tokenizer=tokens)
    again = load(tmp_path / "again").config
    assert (again.footage, again.policy, again.marks) == (model.config.footage, model.config.policy, model.config.marks)
    told = json.loads((tmp_path / "again" / FILE).read_text())
    assert told["video_processor_type"] == "LlavaOnevisionVideoProcessor" and told["num_frames"] == 5
    assert told["size"] == {"height": SIDE, "width": SIDE} and not told.keys() & {"image_grid_pinpoints", "do_pad"}
    (tmp_path / "again" / FILE).write_text(json.dumps({"size": {"height": 24, "width": 24}}))
    with pytest.raises(ConfigError, match="frames of 24 pixels, and tiles of 32"):
        load(tmp_path / "again")
    with pytest.raises(ConfigError, match="footage by 'internvl' for a tower that reads 'llava-onevision'"):
        model.config.with_(footage=Footage.usual("internvl", SIDE))
    next_ = model.config.with_(footage=None, policy=model.config.policy.with_(max_tiles=None))
    assert next_.films is None  # LLaVA-NeXT reads no videos


def test_fewer_tokens_of_each_frame(both):
    """Of reduced frames none is stitched: their tokens follow one another, without a newline."""
    talker = both[1].reduced(CellsConfig(keep=1))
    film = Video(movie(3, 0), seconds=[0, 1, 2])
    assert (talker.prompt([talker.turn(film, "what?")]).stream.kinds == 2).sum() == 3
    assert isinstance(talker.ask(film, "what?", max_new=3), str)
