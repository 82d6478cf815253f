"""HallusionBench: questions about an image, about a modified image, and without an image."""

from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder, read_json_rows
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns, check_unique_ids


class HallusionRow(msgspec.Struct):
    """A row of HallusionBench's JSON file."""

    category: str
    subcategory: str
    visual_input: Literal["0", "1", "2"]  # no image, the original, a modified one
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

    def to_sample(self, images: tuple[Path | bytes, ...]) -> Sample:
        of_set = f"{self.category}_{self.subcategory}_{self.set_id}"
        # Questions of category VS without an image have figure 0.
        is_without_figure = self.category == "VS" and str(self.figure_id) == "0"
        return Sample(
            id=self.id,
            images=images,
            turns=build_question_turns(self.question, len(images)),
            answers=("yes" if self.gt_answer == "1" else "no",),
            metadata={
                "category": self.category,
                "subcategory": self.subcategory,
                "figure": None if is_without_figure else f"{of_set}_{self.figure_id}",
                "question": f"{of_set}_{self.question_id}",
                "details": self.gt_answer_details,
            },
        )


def open_hallusion(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open `HallusionBench.json`. The metadata names what is scored together: the figure, and the question over all
    figures."""
    rows = read_json_rows(path, HallusionRow)
    check_unique_ids([row.id for row in rows], path)
    return SampleDataset("hallusion", path, rows, partial(_sample, folder))


def _sample(folder: MediaFolder, row: HallusionRow) -> Sample:
    file_name = row.filename or f"{row.category}/{row.subcategory}/{row.set_id}_{row.figure_id}.png"
    return row.to_sample(() if row.visual_input == "0" else (folder.find_file(file_name, row.id),))
