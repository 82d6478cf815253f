"""How a video stands in a stream: as one run of tokens or, in Qwen3-VL, patch by patch behind the time of each."""

from collections.abc import Sequence

from vitrail.models.vlm import VLMConfig
from vitrail.models.vlm_config import Shape
from vitrail.processing.grid import Grid
from vitrail.processing.text import Tokenizer
from vitrail.stream import POSITIONS, Part, patch_by_patch, stamp, video, words
from vitrail.talker.videos import Watched


def film(
    ids: Sequence[int], start: int, at: int, shape: Shape, seen: Watched, config: VLMConfig, tokenizer: Tokenizer
) -> tuple[list[Part], int]:
    """The words ids[start:at] and the video whose mark is ids[at]; and where the words behind it begin."""
    assert isinstance(shape, Grid)
    lead, clip = list(ids[start:at]), video(shape, seconds=seen.seconds)
    if not POSITIONS[config.rules.positions].apart:
        return [words(lead), clip], at + 1
    opened, closed = config.marks["vision_start"], config.marks["vision_end"]
    behind = at + 1
    if lead[-1:] == [opened] and ids[behind : behind + 1] == [closed]:  # they stand around each patch instead
        lead, behind = lead[:-1], behind + 1
    stamps = [stamp(time) for time in seen.times]
    texts = [_followed(lead, stamps[0], tokenizer), *(tokenizer.encode(text, literal=True) for text in stamps[1:])]
    return patch_by_patch(clip, [words([*text, opened]) for text in texts], [words([closed])]), behind


def _followed(lead: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Words, and a text behind them: the last of them may be cut into tokens in another way than without it."""
    specials = set(tokenizer.specials.values())
    last = next((n + 1 for n in reversed(range(len(lead))) if lead[n] in specials), 0)
    return lead[:last] + tokenizer.encode(tokenizer.decode(lead[last:]) + text, literal=True)
