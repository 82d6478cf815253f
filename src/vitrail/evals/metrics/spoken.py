"""What of a text is the answer, where a model thinks aloud before it."""

import re

_THOUGHT = re.compile(r"^.*</think>|<think>.*$", re.DOTALL | re.IGNORECASE)  # a prompt may have opened it
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)


def spoken(text: str) -> str:
    """What stands behind thoughts, <think> … </think>, and of that in the last <answer> … </answer>; a thought that
    never ends is no answer."""
    if "<" not in text:
        return text
    said = _THOUGHT.sub(" ", text)
    inside = _ANSWER.findall(said)
    return (inside[-1] if inside else said).strip()
