"""Extracts the final answer from texts with reasoning."""

import re

# The prompt may contain the opening tag.
_THOUGHT_PATTERN = re.compile(r"^.*</think>|<think>.*$", re.DOTALL | re.IGNORECASE)
_ANSWER_PATTERN = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)


def extract_final_answer(text: str) -> str:
    """Remove reasoning (<think> … </think>) and return the last <answer> … </answer>, or all remaining text.

    Reasoning without an end tag is removed too.
    """
    if "<" not in text:
        return text
    remaining = _THOUGHT_PATTERN.sub(" ", text)
    answers = _ANSWER_PATTERN.findall(remaining)
    return (answers[-1] if answers else remaining).strip()
