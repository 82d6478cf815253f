"""Model adapter of lmms-eval: `python -m lmms_eval --model vitrail --model_args pretrained=FOLDER`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats.sample import show_progress
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import ConfigError, VitrailError
from vitrail.integrations.framework_adapter import (
    generate_answer,
    import_framework,
    load_chat_pipeline,
    offset_seed,
    parse_generation_options,
)
from vitrail.models.video_inputs import is_video
from vitrail.pipelines import ChatPipeline

PIP_REQUIREMENT = "lmms-eval"
IMAGE_PLACEHOLDER = "<image>"  # how tasks mark the place of an image
_register = import_framework("lmms_eval.api.registry", PIP_REQUIREMENT).register_model


class _PreparedRequest(NamedTuple):
    """A request: the question with the model's image tokens, the media, and the generation options."""

    question: str
    media: list[Any]
    options: dict[str, Any]


@_register("vitrail")
class VitrailModel(import_framework("lmms_eval.api.model", PIP_REQUIREMENT).lmms):
    """Adapter of lmms-eval for a vision-language model.

    `pretrained` is a folder, a hub id or a `ChatPipeline`. Up to `batch_size` requests with equal options are answered
    in one batch; the answers equal those of single requests. `max_new_tokens` and the other options are the defaults
    for options that a task does not set.
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str | Path | ChatPipeline,
        *,
        template: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        num_frames: int | None = None,
        fps: float | None = None,
        **options: Any,
    ):
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError(
                "WORLD_SIZE is above 1, and each process would answer all requests",
                "start one process without a launcher",
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size is {batch_size!r}", "give a positive integer")
        parse_generation_options(options)  # fail early, before the weights are loaded
        self.pipeline = load_chat_pipeline(pretrained, template, device)
        self.batch_size = int(batch_size)
        self.default_options = options
        self.video_sampling: dict[str, Any] = {"num_frames": num_frames, "fps": fps}

    # ---- methods that lmms-eval calls -----------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer requests (context, options, doc_to_visual, doc_id, task, split) in their order."""
        answers: list[str] = []
        with progress_bar("answers", len(requests), unit="") as bar:
            for batch in self._group_requests(requests):
                texts = self._answer_batch(batch, len(answers))
                if texts is None:
                    texts = [self._answer_one(request, len(answers) + index) for index, request in enumerate(batch)]
                answers += texts
                bar.update(len(batch))
        for request, text in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args[:2], text)
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Score requests (context, continuation, doc_to_visual, doc_id, task, split).

        Returns for each the loss of the continuation as the whole answer, and whether it is the greedy answer. The
        loss is the mean of −log p over the tokens. lmms-eval picks the option with the lowest value, although it calls
        the values likelihoods, because its own models return their loss. The space before a continuation is removed.
        """
        scores = []
        for request in show_progress(requests, "likelihoods"):
            if len(request.args) != 6:
                raise ConfigError("an unconditional likelihood is not supported", "remove the metric acc_mutual_info")
            context, target, visual, doc_id, task, split = request.args
            doc = self.task_dict[task][split][doc_id]
            media = list(visual(doc) or ())
            answer = target if isinstance(target, str) else str(target(doc))
            ((option,),) = self.pipeline.score_options(
                [(media, self._insert_image_tokens(context, media), [answer.strip()])]
            )
            scores.append((-option.logprob / option.num_tokens, option.is_greedy))
        return scores

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        raise ConfigError("multi-round tasks are not supported", "choose tasks with output_type generate_until")

    # ---- requests -------------------------------------------------------------------------------------------------

    def _group_requests(self, requests: Sequence[Any]) -> Iterator[list[_PreparedRequest]]:
        """Yield batches of consecutive requests with equal options, either all with media or all without."""
        batch: list[_PreparedRequest] = []
        for request in requests:
            prepared = self._prepare_request(*request.args)
            fits = not batch or (batch[0].options == prepared.options and bool(batch[0].media) == bool(prepared.media))
            if batch and (not fits or len(batch) == self.batch_size):
                yield batch
                batch = []
            batch.append(prepared)
        if batch:
            yield batch

    def _prepare_request(
        self, context: str, options: Mapping[str, Any], visual: Any, doc_id: Any, task: str, split: str
    ) -> _PreparedRequest:
        media = list(visual(self.task_dict[task][split][doc_id]) or ())
        requested = {name: value for name, value in options.items() if value is not None}
        return _PreparedRequest(
            self._insert_image_tokens(context, media),
            media,
            parse_generation_options({**self.default_options, **requested}),
        )

    def _insert_image_tokens(self, context: str, media: list[Any]) -> str:
        """Replace image placeholders by the model's image token. Without placeholders images come first."""
        return context.replace(IMAGE_PLACEHOLDER, self.pipeline.vision_tokens["image"]) if media else context

    def _answer_one(self, prepared: _PreparedRequest, number: int) -> str:
        video_sampling = self.video_sampling if any(map(is_video, prepared.media)) else {}
        return generate_answer(
            self.pipeline,
            [self.pipeline.build_message(prepared.media, prepared.question, **video_sampling)],
            offset_seed(prepared.options, number),
        )

    def _answer_batch(self, batch: list[_PreparedRequest], number: int) -> list[str] | None:
        """Answer requests in one batch. Returns None if that fails, so that each is answered on its own."""
        if len(batch) == 1:
            return None
        try:
            return self.pipeline.ask_batch(
                [prepared.media for prepared in batch],
                [prepared.question for prepared in batch],
                **offset_seed(batch[0].options, number),
            )
        except VitrailError:
            return None


def build_manifest() -> Any:
    """Return the manifest by which lmms-eval finds this adapter through the package's entry point."""
    registry = import_framework("lmms_eval.models.registry_v2", PIP_REQUIREMENT)
    return registry.ModelManifest(model_id="vitrail", simple_class_path="vitrail.integrations.lmms_eval.VitrailModel")
