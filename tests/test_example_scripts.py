"""Scripts in `examples/` with the bundled models replaced by fakes: accuracy, drawings, captions and contact sheets."""

import runpy
from pathlib import Path

from PIL import Image

from vitrail.data.examples import load_examples

FOLDER = Path(__file__).parents[1] / "examples"
TRUTH = {(scene.file, one["question"]): one["answer"] for scene in load_examples() for one in scene.questions}


class FakeChatPipeline:
    """Pipeline with one wrong answer."""

    def __init__(self, wrong: str):
        self.wrong = wrong

    def ask_batch(self, files, questions, **_):
        return [
            "?" if question == self.wrong else TRUTH[file, question]
            for file, question in zip(files, questions, strict=True)
        ]


class FakeUnifiedPipeline:
    """Pipeline that draws a colour for each prompt."""

    def __init__(self):
        self.requests = []

    def draw(self, prompt, *, seed):
        self.requests.append((prompt, seed))
        return Image.new("RGB", (96, 96), (len(self.requests), 0, 0))

    def caption(self, image):
        return f"Number {image.getpixel((0, 0))[0]}."


def test_correct_answers_are_counted_and_wrong_ones_printed(monkeypatch, capsys):
    *_, (_, last) = TRUTH
    ask_examples = runpy.run_path(str(FOLDER / "ask_examples.py"))["ask_examples"]
    sheets = []
    for wrong in ("nothing", last):
        monkeypatch.setattr("vitrail.load", lambda name, wrong=wrong: FakeChatPipeline(wrong))
        sheets.append(ask_examples())
    assert capsys.readouterr().out.split("\n")[:2] == [
        f"{len(TRUTH)} of {len(TRUTH)}",
        f"{len(TRUTH) - 1} of {len(TRUTH)}",
    ]
    assert sheets[0].width == sheets[1].width and sheets[0].tobytes() != sheets[1].tobytes()


def test_each_prompt_is_drawn_and_captioned(monkeypatch):
    script, pipeline, lines = runpy.run_path(str(FOLDER / "draw_examples.py")), FakeUnifiedPipeline(), []
    monkeypatch.setattr("vitrail.load", lambda name: pipeline)

    def draw_contact_sheet(tiles, title, **_):
        lines.extend(tile.lines for tile in tiles)
        return Image.new("RGB", (1, 1))

    monkeypatch.setitem(script["draw_examples"].__globals__, "draw_contact_sheet", draw_contact_sheet)
    script["draw_examples"](seed=4)
    assert pipeline.requests == [(prompt, 4) for prompt in script["PROMPTS"]] and len(pipeline.requests) == 8
    assert lines == [[f"“{prompt}”", f"Caption: Number {n}."] for n, prompt in enumerate(script["PROMPTS"], 1)]
