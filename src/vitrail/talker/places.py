"""How a video stands in a stream: as one run of tokens, in Qwen3-VL patch by patch behind the time of each, in InternVL
frame by frame behind its number."""

from collections.abc import Sequence

from vitrail.models.vlm import VLMConfig
from vitrail.models.vlm_config import Shape
from vitrail.processing.text import Tokenizer
from vitrail.stream import POSITIONS, Part, patch_by_patch, stamp, words
from vitrail.talker.videos import Watched


def film(
    ids: Sequence[int],
    start: int,
    at: int,
    shape: Shape,
    seen: Watched,
    config: VLMConfig,
    tokenizer: Tokenizer,
    around: tuple[list[int], list[int]],
) -> tuple[list[Part], int]:
    """The words ids[start:at] and the video whose mark is ids[at]; and where the words behind it begin. `around`:
    the ids before and behind a picture."""
    lead, clip, behind = list(ids[start:at]), config.clip(shape, seconds=seen.seconds), at + 1
    if config.films is not None and config.films.rule == "internvl":
        said = [f"Frame{n}: " for n in range(1, len(seen.times) + 1)]
        said[1:] = [f"\n{text}" for text in said[1:]]
    elif POSITIONS[config.rules.positions].apart:
        around = [config.marks["vision_start"]], [config.marks["vision_end"]]
        if (lead[-1:], ids[behind : behind + 1]) == around:  # they stand around each patch instead
            lead, behind = lead[:-1], behind + 1
        said = [stamp(time) for time in seen.times]
    else:
        return [words(lead), clip], behind
    opened, closed = around
    texts = [_followed(lead, said[0], tokenizer), *(tokenizer.encode(text, literal=True) for text in said[1:])]
    return patch_by_patch(clip, [words([*text, *opened]) for text in texts], [words(closed)]), behind


def _followed(lead: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Words, and a text behind them: the last of them may be cut into tokens in another way than without it."""
    specials = set(tokenizer.specials.values())
    last = next((n + 1 for n in reversed(range(len(lead))) if lead[n] in specials), 0)
    return lead[:last] + tokenizer.encode(tokenizer.decode(lead[last:]) + text, literal=True)
