"""`vitrail data instruct`: instruction data about pictures, written by a text model that is told of them in words."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.data.instruct.prompts import KINDS
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.data.instruct import Seen, Writer, Yield

LEAST = 32  # new tokens that a model must have room for


def instruct(
    what: str,
    /,
    *,
    out: Path,
    model: str = "stories15M",
    name: str = "default",
    boxes: Path | None = None,
    pictures: Path | None = None,
    kinds: Annotated[tuple[str, ...], Parameter(negative="")] = tuple(KINDS),
    count: int = 100,
    seed: int = 0,
    tokens: int = 400,
    temperature: float = 0.7,
    side: int = 128,
    atlas: str = "emoji",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Make instruction data from captions and boxes: a text model writes, a filter reads, LLaVA's format is kept.

    Writes instruct.jsonl, refused.jsonl with the reasons, and answers.jsonl with all that was written; then a table of
    what came of each kind. Called again with the same settings, it goes on where it stopped.

    Parameters
    ----------
    what
        A file with captions or boxes (COCO's captions or instances), or scenes by their preset.
    out
        Folder for the data; scenes' pictures too.
    model
        stories15M, smollm2-135m or any that `vitrail write` takes; or the address of a server that speaks OpenAI's
        format, such as http://127.0.0.1:8080/v1.
    name
        The model's name at that server.
    boxes
        COCO's instances, to go with a file of captions.
    pictures
        Folder the pictures of a file lie in; beside it unless said.
    kinds
        conversation, detail, reasoning, yesno, choice; all unless said. May be repeated.
    count
        Pictures, from the first on.
    seed
        Of scenes, and of what is drawn of the model.
    tokens
        A text has at most.
    temperature
        0 always takes the likeliest token.
    side
        Pixels of a scene's side.
    atlas
        Sprites of scenes: emoji, or a .safetensors file.
    device
        cpu or cuda; auto is a GPU if there is one.
    """
    from tqdm import tqdm

    from vitrail.data.instruct import make
    from vitrail.data.scenes.config import PRESETS

    if count < 1 or tokens < LEAST:
        raise ConfigError(f"{count} pictures and {tokens} tokens", f"give at least 1 and {LEAST}")
    settings: dict[str, Any] = {
        "what": what,
        "model": model,
        "name": name,
        "tokens": tokens,
        "temperature": temperature,
    }
    if what in PRESETS:
        settings |= {"side": side, "atlas": atlas}
        seen = _scenes(what, out, count, seed, side, atlas)
    else:
        settings |= {"boxes": str(boxes), "pictures": str(pictures)}
        seen = _file(Path(what), boxes, pictures)
    writer = _writer(model, name, tokens, temperature, device)
    bar = tqdm(islice(seen, count), total=count, unit="picture", disable=None)
    found = make(bar, writer, out, kinds=kinds, seed=seed, settings=settings)
    _show(found)
    print(out / "instruct.jsonl")


def _scenes(preset: str, out: Path, count: int, seed: int, side: int, atlas: str) -> "Iterator[Seen]":
    from vitrail.data.instruct import from_scenes
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.told import Teller

    source = SceneSource(ScenesConfig(atlas=atlas, preset=preset, side=side, seed=seed), open_atlas(atlas))
    return from_scenes(Teller(source), 0, count, out / "pictures")


def _file(path: Path, boxes: Path | None, pictures: Path | None) -> "Iterator[Seen]":
    from vitrail.data.formats import guess, open_format
    from vitrail.data.instruct import from_samples

    samples = open_format(guess(path), path, pictures=pictures)
    more = None if boxes is None else open_format("coco-instances", boxes, pictures=pictures or path.parent)
    return from_samples(samples, more, root=pictures or path.parent)


def _writer(model: str, name: str, tokens: int, temperature: float, device: Literal["auto", "cpu", "cuda"]) -> "Writer":
    if model.startswith(("http://", "https://")):
        from vitrail.hub.endpoint import endpoint

        return endpoint(model, name, tokens=tokens, temperature=temperature)
    from vitrail import hub
    from vitrail.backbones.decoder import Decoder
    from vitrail.cli.eval_common import Common, device_of
    from vitrail.generate import Sampling, generate
    from vitrail.processing.chat import ChatTemplate

    decoder, words = hub.load(model, device=device_of(Common(device=device))), hub.tokenizer(model)
    if not isinstance(decoder, Decoder):
        raise ConfigError(f"{model} is a {type(decoder).__name__} and does not write text", "give a language model")
    template = None if words.chat_template is None else ChatTemplate.of(words)

    def write(prompt: str, seed: int) -> str | None:
        if template is not None:
            ids = template.encode([{"role": "user", "content": prompt}], words, generate=True).ids
        else:
            ids = words.encode(prompt, specials=True, literal=True)
        room = min(tokens, decoder.config.context - len(ids))
        if room < LEAST:
            return None
        sampling = Sampling(temperature=temperature, seed=seed)
        return generate(decoder, [ids], max_new=room, sampling=sampling, tokenizer=words)[0].text

    return write


def _show(found: "dict[str, Yield]") -> None:
    for kind, one in found.items():
        share = f" ({one.kept / one.pairs:.0%})" if one.pairs else ""
        answers = ", ".join(f"{answer} {n}" for answer, n in sorted(one.answers.items()))
        print(
            f"{kind:14}{one.asked:,} texts, {one.pairs:,} pairs, {one.kept:,} kept{share}{answers and '; ' + answers}"
        )
        for reason, n in one.refused.most_common():
            print(f"{'':14}  refused {n:,}: {reason}")
