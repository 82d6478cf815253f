"""`vitrail eval MODEL hellaswag --data FILE`: benchmarks of words alone, by how likely each option is."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.cli.eval_common import ASKED, Asked, device_of, tell, write_page
from vitrail.cli.written import check_written
from vitrail.errors import CheckpointError, ConfigError, nearest


def text(
    name: str,
    model: str,
    /,
    *,
    data: Path,
    labels: Path | None = None,
    limit: int | None = None,
    blind: Annotated[bool, Parameter(negative="--no-blind")] = True,
    answers: Path | None = None,
    page: Path | None = None,
    common: Asked = ASKED,
) -> None:
    """Choose among continuations by their likelihood, asked and scored as lm-evaluation-harness does.

    acc takes the option of the largest sum over its tokens, acc_norm that of the largest sum over its characters.

    Parameters
    ----------
    name
        arc, hellaswag, piqa, siqa or winogrande.
    model
        A language model, or another that has one in it: a vision-language model, a unified one. A folder, a file, a hub
        id, or stories15M or smollm2-135m.
    data
        The benchmark's own file, its folder, or the parquet of a hub.
    labels
        The answers of PIQA, Social IQa or WinoGrande, where they lie elsewhere than beside the file.
    limit
        Samples at most, drawn alike from all.
    blind
        Also weigh the options without their question, and put that beside.
    answers
        A file that the likelihoods of every sample are added to as they come. What it holds already of the same model,
        by name, is not asked again.
    page
        An HTML file to write the scores to, with examples of right and wrong choices.
    """
    from vitrail import hub
    from vitrail.backbones.decoder import DecoderConfig
    from vitrail.evals.suites.texts import TEXTS, weighed
    from vitrail.generate.continuations import Continuations
    from vitrail.hub.configs import read_config
    from vitrail.models.looking import LookingVLMConfig
    from vitrail.models.unified import UnifiedConfig
    from vitrail.models.vlm import VLMConfig
    from vitrail.talker import home

    if name not in TEXTS:
        raise ConfigError(f"there is no benchmark {name!r} of words alone", nearest(name, TEXTS))
    row = TEXTS[name].row
    beside: dict[str, Any] = {} if labels is None else {"labels": labels}
    samples = row.read(data, limit=limit, **beside)
    # What cannot be read, scored or written is said before the weights are read.
    for path, option in ((common.out, "--out"), (answers, "--answers"), (page, "--page")):
        check_written(path, option)
    samples.check()
    row.score(samples, [next(iter(sample.choices)) for sample in samples])
    config = read_config(model)
    if not isinstance(config, DecoderConfig | VLMConfig | LookingVLMConfig | UnifiedConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise CheckpointError(f"{model} is a {kind} and has no decoder of words", "give a language model")
    words = hub.tokenizer(model)
    where, dtype = home(device_of(common))
    speaker = Continuations(hub.load(model, dtype=dtype, device=where), words)

    def ask(blind: bool) -> list[str]:
        return weighed(
            speaker.likelihoods, TEXTS[name], samples, batch=common.batch, blind=blind, keep=answers, model=model
        )

    said, unseen = ask(blind=False), ask(blind=True) if blind else None
    scores = row.score(samples, said, unseen)
    settings = {"data": str(data), "labels": None if labels is None else str(labels), "prompt": row.prompt}
    settings |= {"limit": limit, "texts_cut": speaker.cut}
    cut = f"{speaker.cut:,} texts were longer than the model's context, and lost their beginning" if speaker.cut else ""
    tell(name, model, settings, scores, common, cut)
    if page is not None:
        from vitrail.evals.suites.scored.continued import chosen
        from vitrail.show.scored import examples_of

        questions = [row.question(sample, f"{row.prompt}\n{{choices}}") for sample in samples]
        letters = [chosen(answer, sample) for answer, sample in zip(said, samples, strict=True)]
        write_page(page, name, model, settings, scores, examples_of(row, samples, questions, letters), common)
