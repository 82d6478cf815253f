"""A vision-language model inside lmms-eval: `python -m lmms_eval --model vitrail --model_args pretrained=FOLDER`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats.sample import progress
from vitrail.data.sources.progress import bar
from vitrail.errors import ConfigError, VitrailError
from vitrail.harnesses.asked import answered, framework, read_options, shifted, talker_of
from vitrail.models.videos import is_video
from vitrail.talker import Talker

INSTALL = "lmms-eval"
IMAGE = "<image>"  # how tasks say where a picture stands, if they say it
_register = framework("lmms_eval.api.registry", INSTALL).register_model


class _Asked(NamedTuple):
    """A request: its words, with pictures' places as the model has them, what is shown, and how it is answered."""

    question: str
    shown: list[Any]
    how: dict[str, Any]


@_register("vitrail")
class Vitrail(framework("lmms_eval.api.model", INSTALL).lmms):
    """`pretrained` is a folder, a hub id or a `Talker`. `batch_size` requests of the same options are answered side by
    side; the answers are those of one at a time. What a task does not say is as `max_new_tokens` and the other options
    say here."""

    is_simple = True

    def __init__(
        self,
        pretrained: str | Path | Talker,
        *,
        template: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        frames: int | None = None,
        fps: float | None = None,
        **options: Any,
    ):
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError("several processes would all answer everything", "start one, without a launcher")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"a batch_size of {batch_size!r}", "give a number of requests")
        read_options(options)  # what cannot be is said before the weights are read
        self.talker, self.batch_size, self.options = talker_of(pretrained, template, device), int(batch_size), options
        self.film: dict[str, Any] = {"frames": frames, "fps": fps}

    # ---- what lmms-eval calls -------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The answers, in the order of the requests: (context, options, doc_to_visual, doc_id, task, split) each."""
        said: list[str] = []
        with bar("answers", len(requests), unit="") as done:
            for some in self._alike(requests):
                texts = self._side_by_side(some, len(said))
                if texts is None:
                    texts = [self._alone(one, len(said) + n) for n, one in enumerate(some)]
                said += texts
                done.update(len(some))
        for request, text in zip(requests, said, strict=True):
            self.cache_hook.add_partial("generate_until", request.args[:2], text)
        return said

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation, doc_to_visual, doc_id, task, split) each how unlikely the continuation is as the
        whole answer, and whether the model would say it.

        lmms-eval takes the least of these, though it calls them likelihoods, because its own models give their loss:
        the mean over the tokens of −log p. So does this; the space before a continuation is the template's affair.
        """
        found = []
        for request in progress(requests, "likelihoods"):
            if len(request.args) != 6:
                raise ConfigError("an answer to no question cannot be weighed", "leave acc_mutual_info out")
            context, target, visual, number, task, split = request.args
            doc = self.task_dict[task][split][number]
            shown = list(visual(doc) or ())
            answer = target if isinstance(target, str) else str(target(doc))
            ((option,),) = self.talker.weighed([(shown, self._placed(context, shown), [answer.strip()])])
            found.append((-option.logprob / option.tokens, option.greedy))
        return found

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        raise ConfigError("tasks of several rounds are not asked", "choose tasks of output_type generate_until")

    # ---- how it is asked ------------------------------------------------------------------------------------------

    def _alike(self, requests: Sequence[Any]) -> Iterator[list[_Asked]]:
        """Requests in their order, so many together as may be answered side by side: of the same options, and all of
        them with pictures or none."""
        some: list[_Asked] = []
        for request in requests:
            one = self._asked(*request.args)
            fits = not some or (some[0].how == one.how and bool(some[0].shown) == bool(one.shown))
            if some and (not fits or len(some) == self.batch_size):
                yield some
                some = []
            some.append(one)
        if some:
            yield some

    def _asked(
        self, context: str, options: Mapping[str, Any], visual: Any, number: Any, task: str, split: str
    ) -> _Asked:
        shown = list(visual(self.task_dict[task][split][number]) or ())
        told = {name: value for name, value in options.items() if value is not None}
        return _Asked(self._placed(context, shown), shown, read_options({**self.options, **told}))

    def _placed(self, context: str, shown: list[Any]) -> str:
        """The words with the model's own mark where a picture is to stand; without places pictures come first."""
        return context.replace(IMAGE, self.talker.tokens["image"]) if shown else context

    def _alone(self, one: _Asked, number: int) -> str:
        film = self.film if any(map(is_video, one.shown)) else {}
        return answered(self.talker, [self.talker.turn(one.shown, one.question, **film)], shifted(one.how, number))

    def _side_by_side(self, some: list[_Asked], number: int) -> list[str] | None:
        """None where that cannot be: asked by itself, each either answers or says what is wrong with it."""
        if len(some) == 1:
            return None
        try:
            return self.talker.answers(
                [one.shown for one in some], [one.question for one in some], **shifted(some[0].how, number)
            )
        except VitrailError:
            return None


def manifest() -> Any:
    """What lmms-eval finds this by, through the package's entry point."""
    known = framework("lmms_eval.models.registry_v2", INSTALL)
    return known.ModelManifest(model_id="vitrail", simple_class_path="vitrail.harnesses.lmms.Vitrail")
