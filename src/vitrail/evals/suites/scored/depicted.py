"""Captions by how a contrastive model sees them: beside the picture, and beside people's.

N pictures, E width of the embedding
"""

from collections.abc import Sequence

from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.contrastive import Embedder
from vitrail.evals.metrics.clipscore import PREFIX, WEIGHT, clip_score, ref_clip_score, reference_score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet
from vitrail.evals.viewer import Picture

MOST = {"CLIPScore": WEIGHT, "RefCLIPScore": 2 * WEIGHT / (WEIGHT + 1)}
"""What a caption can have that lies exactly where its picture and a reference do."""


class Depicted:
    """Pictures and people's captions as a contrastive model embeds them, looked at once: captions of these pictures can
    then be scored again and again."""

    def __init__(self, embedder: Embedder, samples: Sequence[Sample]):
        shown: list[Picture] = []
        told: list[str] = []
        self.rows: dict[str, int] = {}
        for n, sample in enumerate(samples):
            if len(sample.pictures) != 1 or not sample.captions:
                raise DataError(
                    f"sample {sample.id!r} has {len(sample.pictures)} pictures and {len(sample.captions)} captions",
                    "CLIPScore needs one picture and at least one caption",
                )
            shown.append(sample.pictures[0])
            told += [PREFIX + caption for caption in sample.captions]
            self.rows[sample.id] = n
        self.embedder = embedder
        self.pictures = embedder.images(shown)  # (N, E)
        self.references = embedder.texts(told).split([len(sample.captions) for sample in samples])

    def scores(self, sheet: Sheet, said: Said) -> dict[str, Values]:
        """CLIPScore and RefCLIPScore of each caption."""
        unknown = next((sample.id for sample in sheet.samples if sample.id not in self.rows), None)
        if unknown is not None:
            raise DataError(f"picture {unknown!r} was not looked at", "give the samples that are scored")
        rows = [self.rows[sample.id] for sample in sheet.samples]
        captions = self.embedder.texts([PREFIX + text for text in said])
        clip = clip_score(self.pictures[rows], captions)
        near = reference_score(captions, [self.references[row] for row in rows])
        return {"CLIPScore": clip.tolist(), "RefCLIPScore": ref_clip_score(clip, near).tolist()}
