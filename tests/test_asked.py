"""The example that asks the vision-language model that ships: what it counts, and what it paints."""

import runpy
from pathlib import Path

from vitrail.data.examples import examples

FILE = Path(__file__).parents[1] / "examples" / "asked.py"
TRUTH = {(scene.file, one["question"]): one["answer"] for scene in examples() for one in scene.questions}


class Knowing:
    """A model that is wrong once."""

    def __init__(self, wrong: str):
        self.wrong = wrong

    def answers(self, files, questions, **_):
        return [
            "?" if question == self.wrong else TRUTH[file, question]
            for file, question in zip(files, questions, strict=True)
        ]


def test_right_answers_are_counted_and_wrong_ones_are_told(monkeypatch, capsys):
    *_, (_, last) = TRUTH
    asked = runpy.run_path(str(FILE))["asked"]
    sheets = []
    for wrong in ("nothing", last):
        monkeypatch.setattr("vitrail.load", lambda name, wrong=wrong: Knowing(wrong))
        sheets.append(asked())
    assert capsys.readouterr().out.split("\n")[:2] == [
        f"{len(TRUTH)} of {len(TRUTH)}",
        f"{len(TRUTH) - 1} of {len(TRUTH)}",
    ]
    assert sheets[0].width == sheets[1].width and sheets[0].tobytes() != sheets[1].tobytes()
