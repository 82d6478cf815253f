"""`vitrail eval MODEL naming`: what pictures show, asked of a model that answers questions."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.eval_common import COMMON, Common, tell
from vitrail.cli.eval_reader import open_reader
from vitrail.cli.fewer import FEWER, Fewer


def naming(
    model: str,
    /,
    *,
    data: Annotated[tuple[str, ...], Parameter(negative="")] = ("cifar10",),
    part: Literal["all", "train", "test"] = "test",
    only: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    among: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    names: Literal["own", "category"] = "own",
    trim: Annotated[bool, Parameter(negative="")] = False,
    unseen: Annotated[bool, Parameter(negative="--seen")] = False,
    limit: int | None = None,
    fewer: Fewer = FEWER,
    common: Common = COMMON,
) -> None:
    """Ask what single pictures show. An answer is right if it is the picture's name, word for word.

    Parameters
    ----------
    model
        A unified model, or a vision-language model: a folder.
    data
        Sources of pictures (`vitrail data list`) or folders; may be repeated.
    part
        Of sets with classes, such as cifar10; of others all pictures are asked about.
    only
        A category, such as animals; may be repeated.
    among
        Ask only about names that this source has too: those that the model has met. May be repeated.
    names
        What a picture is called by: its own name, or its category (of a folder: the one that it lies in).
    trim
        Cut pictures to what is opaque.
    unseen
        Ask in words that training never uses.
    limit
        Pictures at most, drawn alike from all.
    """
    from vitrail.data.named import NamedConfig, NamedSource
    from vitrail.evals.suites.naming import named

    source = NamedSource(NamedConfig(data=data, part=part, only=only, names=names, trim=trim))
    known = [about.name for about in NamedSource(NamedConfig(data=among, names=names)).abouts] if among else []
    reader = open_reader(model, common, fewer, sorted({about.name for about in source.abouts}))
    scores = named(
        reader.answerer, source, reader.side, among=known, limit=limit, unseen=unseen, batch=min(common.batch, 64)
    )
    settings = {"data": data, "part": part, "only": only, "among": among, "names": names, "trim": trim}
    tell("naming", model, {**settings, "unseen": unseen, "limit": limit, **fewer.plain}, scores, common)
