"""What of a text is the answer, where a model thinks aloud before it."""

import re

_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)


def spoken(text: str) -> str:
    """What stands in the last <answer> … </answer>, else all but <think> … </think>; a thought that never ends is no
    answer."""
    inside = _ANSWER.findall(text)
    return inside[-1].strip() if inside else _THOUGHT.sub(" ", text).strip() if "<" in text else text
