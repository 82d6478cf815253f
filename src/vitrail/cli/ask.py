"""`vitrail ask`: questions about pictures and videos, to a vision-language model or a unified one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.cli.fewer import FEWER, Fewer
from vitrail.cli.studio import bar, check, write
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.talker import Talker

Turn = tuple[list[str], str]  # pictures and videos, and the question behind them


def ask(
    picture: str,
    /,
    *words: str,
    model: str = "mini",
    stream: Annotated[bool, Parameter(negative="")] = False,
    max_new: int | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
    template: str | None = None,
    frames: int | None = None,
    fps: float | None = None,
    show: Path | None = None,
    device: str | None = None,
    fewer: Fewer = FEWER,
) -> None:
    """Ask a model questions about pictures and videos.

    Example: vitrail ask scene.png "how many dogs are there?"

    Example: vitrail ask a.jpg b.jpg "what has changed?" "and what has not?" --model llava-hf/llava-1.5-7b-hf --stream

    Example: vitrail ask clip.mp4 "what happens?" --model Qwen/Qwen3-VL-2B-Instruct --fps 1

    Example: vitrail ask a.jpg "what is this?" --model llava-hf/llava-1.5-7b-hf --reduce vispruner --keep 64

    A vision-language model is asked in one conversation, a turn each question, with the pictures written before it; a
    unified model answers each question about its one picture by itself.

    Parameters
    ----------
    picture
        A picture's or a video's file; videos are for Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL,
        LLaVA-OneVision and LLaVA-NeXT-Video.
    words
        Questions, and further files.
    model
        A unified model (mini, unless given), or a vision-language model: mini-vlm, a folder or hub id.
    stream
        Print an answer as it is written. Of a vision-language model.
    max_new
        Tokens of an answer at most: 64 of a unified model, else 256, or what the context has room for.
    temperature
        0 always takes the likeliest token, 1 draws as the model weighs them.
    seed
        The same seed draws the same answers.
    template
        A chat template by name (vicuna, qwen2-vl, …) instead of the folder's own. Of a vision-language model.
    frames
        How many frames are read of each video.
    fps
        How many frames are read of each second of a video: 2, unless the model's folder says otherwise; InternVL
        and LLaVA-NeXT-Video read 8 of the whole, LLaVA-OneVision 32.
    show
        A PNG to write: the picture, brightest where covering it costs the answer most. Of one question to a unified
        model.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    turns = _turns(picture, words)
    if show is not None and len(turns) > 1:
        raise ConfigError(f"{len(turns)} questions, and one picture of where it looked", "ask one at a time")
    if show is not None:
        check(show)
        if temperature or max_new is not None:
            raise ConfigError("--show is of the likeliest answer, at its usual length", "leave the other options out")
    from vitrail.generate.sampling import Sampling
    from vitrail.studio import load, talks

    reduce = fewer.chosen
    how: dict[str, Any] = {"sampling": Sampling(temperature=temperature, seed=seed)}
    how |= {} if max_new is None else {"max_new": max_new}
    if talks(model):
        if show is not None:
            raise ConfigError("--show is drawn for a unified model", "leave it out")
        _check_videos(turns, frames, fps)
        talker = load(model, template=template, device=device, reduce=reduce)
        _converse(talker, turns, stream, {"frames": frames, "fps": fps}, how)
        return
    pictures = sum(len(shown) for shown, _ in turns)
    if pictures > 1:
        raise ConfigError(f"{pictures} pictures for a model that reads one", "ask about one at a time")
    if _videos(turns) or frames is not None or fps is not None:
        raise ConfigError("a unified model reads no videos", "give a model that does, such as a Qwen3-VL")
    if stream:
        raise ConfigError("a unified model answers at once", "leave --stream out")
    loaded = load(model, template=template, device=device, reduce=reduce)
    if show is None:
        print("\n".join(loaded.ask(picture, [question for _, question in turns], **how)))
        return
    with bar() as progress:
        text, seen = loaded.looked(picture, turns[0][1], progress=progress)
    print(text)
    write(seen, show)


def _videos(turns: list[Turn]) -> int:
    from vitrail.models.videos import is_video

    return sum(is_video(name) for shown, _ in turns for name in shown)


def _check_videos(turns: list[Turn], frames: int | None, fps: float | None) -> None:
    """Before a model is loaded."""
    if frames is not None and fps is not None:
        raise ConfigError("--frames and --fps both say how many frames are read", "give one of the two")
    if (frames, fps) != (None, None) and not _videos(turns):
        raise ConfigError("--frames and --fps are of videos, and there is none", "leave them out")


def _turns(picture: str, words: tuple[str, ...]) -> list[Turn]:
    """Each question with the pictures and videos written before it."""
    from vitrail.data.formats.folders import VIDEOS
    from vitrail.search.index import endings

    known, pictures = endings() | VIDEOS, [picture]
    turns: list[Turn] = []
    for word in words:
        if _is_picture(word, known):
            pictures.append(word)
        else:
            turns.append((pictures, word))
            pictures = []
    if not turns or pictures:
        raise ConfigError("there is no question", 'write it behind the picture: "what is this?"')
    return turns


def _is_picture(word: str, endings: set[str]) -> bool:
    """A word that is named like a picture or a video is one, there or not: one that is missing is no question."""
    path = Path(word)
    try:
        return (path.suffix.lower() in endings and " " not in word) or path.is_file()
    except (OSError, ValueError):  # too long for a name, or otherwise none
        return False


def _converse(talker: "Talker", turns: list[Turn], stream: bool, read: dict[str, Any], how: dict[str, Any]) -> None:
    """Print the answers, a line or more each."""
    messages: list[Any] = []
    for pictures, question in turns:
        messages.append(talker.turn(pictures, question, **(read if _videos([(pictures, question)]) else {})))
        if not stream:
            said = talker.chat(messages, **how)
            print(said)
        else:
            said = ""
            try:
                for piece in talker.stream(messages, **how):
                    piece = piece if said else piece.lstrip()
                    print(piece, end="", flush=True)
                    said += piece
            finally:
                if said:
                    print()
        messages.append({"role": "assistant", "content": said.strip()})
