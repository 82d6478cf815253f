"""Ask the vision-language model that ships about the example scenes, and paint what it says.

python examples/asked.py asked.png
"""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.data.examples import examples
from vitrail.show.sheet import Tile, draw_sheet


def asked(name: str = "mini-vlm") -> Image.Image:
    model, tiles, right, of = vitrail.load(name), [], 0, 0
    for scene in examples():
        said = model.answers([scene.file] * len(scene.questions), [q["question"] for q in scene.questions], max_new=16)
        words: list[str] = []
        for one, answer in zip(scene.questions, said, strict=True):
            right, of = right + (answer == one["answer"]), of + 1
            words += [one["question"], answer if answer == one["answer"] else f"{answer}  (it is: {one['answer']})", ""]
        tiles.append(Tile(Image.open(scene.file), words[:-1]))
    print(f"{right} of {of}")
    under = "a question, and below it what the model says; where that is wrong, the truth behind it"
    return draw_sheet(tiles, f"{name}, asked about the example scenes", under=under, columns=4, side=220)


if __name__ == "__main__":
    asked().save(Path(sys.argv[1] if len(sys.argv) > 1 else "asked.png"))
