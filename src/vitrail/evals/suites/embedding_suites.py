"""Suites of contrastive models and image towers: `zeroshot`, `retrieval`, `probe`, `winoground` and `aro`."""

from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.evaluation import BatchedSuite, EvaluationResult
from vitrail.evals.suites.scene_options import SceneSuite
from vitrail.registry import SUITES

if TYPE_CHECKING:
    from vitrail.data.language import SceneLanguage
    from vitrail.data.scenes.scene_source import SceneSource
    from vitrail.evals.context import EvalContext

CONTRASTIVE_MODEL = "A contrastive model: a folder or a hub id."


@SUITES.register("zeroshot")
class ZeroShotSuite(BatchedSuite):
    """Classify images by the nearest class prompt.

    data              cifar10, fashion-mnist, or a folder with one sub-folder a class
    split             train or test
    limit             maximum number of images, sampled evenly
    template          a prompt with {} for the class name, instead of the built-in ones. May be repeated
    unseen_classes    none of the classes was in the training data. Only then the score is called zero-shot
    matryoshka_width  truncate embeddings to their first so many channels. May be repeated
    """

    model_description = CONTRASTIVE_MODEL
    example = "vitrail eval out/clip/final zeroshot --data cifar10 --limit 1000"

    data: str = "cifar10"
    split: Literal["train", "test"] = "test"
    limit: int | None = None
    template: tuple[str, ...] = ()
    unseen_classes: bool = False
    matryoshka_width: tuple[int, ...] = ()

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.contrastive_embedder import truncate_embeddings
        from vitrail.evals.suites import image_collections, zero_shot

        embedder = context.load_embedder(self.batch_size)
        found = image_collections.open_labelled_images(self.data, self.split, self.limit)
        templates, scores = list(self.template or zero_shot.TEMPLATES), []
        v = embedder.embed_texts(zero_shot.build_prompts(found.names, templates))
        for width in self.matryoshka_width:
            truncate_embeddings(v, width)  # refuses an invalid width before images are encoded
        u = embedder.embed_images(found.images)
        for width in self.matryoshka_width or (v.shape[1],):
            scores += zero_shot.evaluate_zero_shot(
                truncate_embeddings(u, width),
                found.labels,
                zero_shot.average_prompts(truncate_embeddings(v, width), len(found.names)),
                found.names,
                zero_shot=self.unseen_classes,
                subset={"width": width} if self.matryoshka_width else {},
            )
        settings = {
            "data": self.data,
            "split": self.split,
            "limit": self.limit,
            "templates": templates,
            "unseen_classes": self.unseen_classes,
            "matryoshka_width": self.matryoshka_width,
            **embedder.describe_inputs(),
        }
        return EvaluationResult(scores, settings, warning=embedder.truncation_warning)


@SUITES.register("retrieval")
class RetrievalSuite(BatchedSuite):
    """Retrieve images by captions and captions by images, over the whole gallery.

    If images have several captions, also retrieves the other captions of an image by its first.

    data              a file in the COCO captions format, an image source (`vitrail data list`) or a folder. Captions of
                      sources and folders are the names of the images
    limit             maximum number of images. A smaller gallery is easier
    texts             names: image-text retrieval. keywords: retrieve a name by all its keywords, without images
    language          use names in another language, such as de. Images without such a name stay in the gallery
    all_languages     report recall@1 in every language of the names
    exclude_category  a category that is not queried, such as flags. Its images stay in the gallery. May be repeated
    by_category       also report recall@1 of each category
    matryoshka_width  truncate embeddings to their first so many channels. May be repeated
    trim              crop images to their opaque region: for models trained on such images (`trim = true` in the
                      recipe)
    log_gamma         raise colours in 0…1 to the power e^log_gamma. Values above 0 darken middle tones. Measures
                      sensitivity to tone
    rerank            BLIP-2 only: rerank the top candidates with the image-text matching head
    """

    model_description = "A contrastive model, or BLIP-2 after its first stage: a folder or a hub id."
    example = "vitrail eval out/clip/final retrieval --data twemoji --language de --exclude-category flags"

    data: str = "twemoji"
    limit: int | None = None
    texts: Literal["names", "keywords"] = "names"
    language: str | None = None
    all_languages: bool = False
    exclude_category: tuple[str, ...] = ()
    by_category: bool = False
    matryoshka_width: tuple[int, ...] = ()
    trim: bool = False
    log_gamma: float = 0.0
    rerank: int | None = None

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.image_feature_extractor import adjust_gamma, trim_images
        from vitrail.evals.suites.collection_retrieval import RetrievalOptions, evaluate_collection
        from vitrail.evals.suites.image_collections import open_image_collection
        from vitrail.evals.suites.retrieval_rerank import evaluate_reranked_retrieval

        embedder: Any = context.load_retriever(self.batch_size)
        if self.rerank is not None and not embedder.supports_matching:
            raise ConfigError(f"{context.name} has no image-text matching head", "remove --rerank")
        options = RetrievalOptions(
            self.texts,
            self.language,
            self.all_languages,
            self.exclude_category,
            self.by_category,
            self.matryoshka_width,
        )
        size = embedder.image_size
        collection = open_image_collection(self.data, self.limit, 2 * size if self.trim else size)
        if self.trim:
            collection.images = trim_images(collection.images, size)
        if self.log_gamma:
            collection.images = adjust_gamma(collection.images, self.log_gamma)
        found = evaluate_collection(embedder, collection, options)
        settings = {"data": self.data, "limit": self.limit, "trim": self.trim, "log_gamma": self.log_gamma}
        settings |= {**options._asdict(), **found.counts}
        scores = found.scores
        if self.rerank is not None:
            gallery = collection.gallery(self.language)
            scores = scores + evaluate_reranked_retrieval(embedder, collection.images, gallery, self.rerank)
            settings["rerank"] = self.rerank
        settings |= embedder.describe_inputs()
        return EvaluationResult(scores, settings, [str(found)], embedder.truncation_warning)


@SUITES.register("probe")
class ProbeSuite(BatchedSuite):
    """Train a linear classifier on the frozen features of an image tower: pooled, or the mean over patches.

    data   cifar10, fashion-mnist, or a folder with `train` and `test`, each with one sub-folder a class
    limit  maximum number of images of each split
    """

    model_description = "A model with an image tower, or a tower: a folder or a hub id."
    example = "vitrail eval out/clip/final probe --data cifar10"

    data: str = "cifar10"
    limit: int | None = None

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.suites.image_collections import open_labelled_images
        from vitrail.evals.suites.linear_probe import train_linear_probe

        extractor = context.load_feature_extractor(self.batch_size)
        train = open_labelled_images(self.data, "train", self.limit, require_splits=True)
        test = open_labelled_images(self.data, "test", self.limit, require_splits=True)
        if train.names != test.names:
            raise DataError(f"{self.data}: train and test have different classes", "give both the same sub-folders")
        x, z = (extractor.extract_features(part.images).to(extractor.device) for part in (train, test))
        found = train_linear_probe(x, train.labels.to(x.device), z, test.labels.to(z.device), train.names)
        settings = {
            "data": self.data,
            "limit": self.limit,
            "trained_on": len(train.labels),
            "features": x.shape[1],
            "penalty": found.penalty,
            "penalties_tried": {f"{strength:g}": share.value for strength, share in found.penalty_scores.items()},
            **extractor.describe_inputs(),
        }
        message = f"penalty {found.penalty:g}, chosen on a tenth of {len(train.labels):,} training images"
        return EvaluationResult(found.scores, settings, [message + found.range_warning])


class SwapSuite(SceneSuite):
    """A suite on scenes whose captions differ in the order of their words."""

    model_description = CONTRASTIVE_MODEL

    preset: str = "colours"

    def open_swap_scenes(self, image_size: int) -> "tuple[SceneSource, SceneLanguage, str]":
        """Return the scenes, their language, and the swap of the preset."""
        from vitrail.data.language import SceneLanguage
        from vitrail.evals.suites.compositionality import SWAP_OF_PRESET

        if self.preset not in SWAP_OF_PRESET:
            raise ConfigError(
                f"the preset {self.preset!r} has no caption pairs", suggest_name(self.preset, SWAP_OF_PRESET)
            )
        source = self.open_scenes(self.preset, image_size, {"combinations": "all"})
        return source, SceneLanguage.build(source.atlas.table), SWAP_OF_PRESET[self.preset]


@SUITES.register("winoground")
class WinogroundScenesSuite(SwapSuite):
    """Match two captions with the same words to two images: a scene, and the scene with colours or positions swapped.

    preset  preset of the scenes: colours (swaps colours) or relations (swaps positions)
    """

    example = "vitrail eval out/clip/final winoground --preset colours"

    preset: str = "colours"

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        import torch

        from vitrail.evals.suites import compositionality

        embedder = context.load_embedder(self.batch_size)
        pairs = compositionality.sample_image_pairs(*self.open_swap_scenes(embedder.image_size), self.count)
        assert pairs.counterpart_pixels is not None
        # (B, 2, E)
        u = torch.stack([embedder.embed_images(list(pixels)) for pixels in (pairs.pixels, pairs.counterpart_pixels)], 1)
        v = torch.stack([embedder.embed_texts(texts) for texts in (pairs.true, pairs.false)], 1)
        scores = compositionality.score_winoground(v @ u.mT)
        settings = {"preset": self.preset, **self.scene_settings, **embedder.describe_inputs()}
        message = f"example: {pairs.true[0]!r}, not {pairs.false[0]!r}"
        return EvaluationResult(scores, settings, [message], embedder.truncation_warning)


@SUITES.register("aro")
class AROScenesSuite(SwapSuite):
    """Distinguish the true caption of a scene from a false one with the same words.

    preset  preset of the scenes, which determines the swap: colours, relations, counting (numbers) or plain (sizes)
    """

    example = "vitrail eval out/clip/final aro --preset relations"

    preset: str = "relations"

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        from vitrail.evals.suites import compositionality

        embedder = context.load_embedder(self.batch_size)
        pairs = compositionality.sample_caption_pairs(*self.open_swap_scenes(embedder.image_size), self.count)
        u = embedder.embed_images(list(pairs.pixels))
        true, false = embedder.embed_texts(pairs.true), embedder.embed_texts(pairs.false)
        settings = {"preset": self.preset, **self.scene_settings, **embedder.describe_inputs()}
        message = f"example: {pairs.true[0]!r}, not {pairs.false[0]!r}"
        scores = [compositionality.score_aro(u, true, false)]
        return EvaluationResult(scores, settings, [message], embedder.truncation_warning)
