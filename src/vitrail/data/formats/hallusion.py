"""HallusionBench: questions asked of a picture, of one that was changed, and of none."""

from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_rows
from vitrail.data.formats.sample import Sample, Samples, asked, refuse_twins


class Row(msgspec.Struct):
    category: str
    subcategory: str
    visual_input: Literal["0", "1", "2"]  # no picture, the original, a changed one
    set_id: Id
    figure_id: Id
    question_id: Id
    question: str
    gt_answer: Literal["0", "1"]
    filename: str | None = None
    gt_answer_details: str = ""

    @property
    def id(self) -> str:
        return "_".join(map(str, (self.category, self.subcategory, self.set_id, self.figure_id, self.question_id)))

    def told(self, shown: tuple[Path | bytes, ...]) -> Sample:
        of_set = f"{self.category}_{self.subcategory}_{self.set_id}"
        # Questions that can be asked without a picture have a figure 0 that is none.
        none = self.category == "VS" and str(self.figure_id) == "0"
        return Sample(
            id=self.id,
            pictures=shown,
            turns=asked(self.question, len(shown)),
            answers=("yes" if self.gt_answer == "1" else "no",),
            notes={
                "category": self.category,
                "subcategory": self.subcategory,
                "figure": None if none else f"{of_set}_{self.figure_id}",
                "question": f"{of_set}_{self.question_id}",
                "details": self.gt_answer_details,
            },
        )


def open_hallusion(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """`HallusionBench.json`. Notes have what belongs together: the figure, and the question over all its figures."""
    rows = read_rows(path, Row)
    refuse_twins([row.id for row in rows], path)
    return Samples("hallusion", path, rows, partial(_sample, folder_for(path, pictures, anywhere)))


def _sample(folder: Folder, row: Row) -> Sample:
    named = row.filename or f"{row.category}/{row.subcategory}/{row.set_id}_{row.figure_id}.png"
    return row.told(() if row.visual_input == "0" else (folder.find(named, row.id),))
