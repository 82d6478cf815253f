"""Ask the bundled vision-language model about the example scenes, and draw a contact sheet of its answers.

python examples/ask_examples.py answers.png
"""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.data.examples import load_examples
from vitrail.plots.contact_sheet import Tile, draw_contact_sheet


def ask_examples(name: str = "mini-vlm") -> Image.Image:
    """Ask every question of the example scenes, print the number of correct answers, and draw a contact sheet."""
    model, tiles, correct, total = vitrail.load(name), [], 0, 0
    for scene in load_examples():
        questions = [one["question"] for one in scene.questions]
        answers = model.ask_batch([scene.file] * len(questions), questions, max_new_tokens=16)
        lines: list[str] = []
        for one, answer in zip(scene.questions, answers, strict=True):
            is_correct = answer == one["answer"]
            correct, total = correct + is_correct, total + 1
            lines += [one["question"], answer if is_correct else f"{answer}  (correct: {one['answer']})", ""]
        tiles.append(Tile(Image.open(scene.file), lines[:-1]))
    print(f"{correct} of {total}")
    return draw_contact_sheet(
        tiles,
        f"Answers of {name} about the example scenes",
        subtitle="Each question with the answer of the model. A wrong answer is followed by the correct one.",
        columns=4,
        tile_size=220,
    )


if __name__ == "__main__":
    ask_examples().save(Path(sys.argv[1] if len(sys.argv) > 1 else "answers.png"))
