"""All that can be asked and said, as text. What stands in braces is filled in: “{a x}” is thing x with its article,
“{plural x}” its plural, “{relation r}” the relation r; see `english.FORMS` and `frames.py`.

`train` and `test` are paraphrases of one question; a model is tested on those it never saw. Of the answers, the ones
that a question's kind chooses by itself are numbered by their place. `MANY` has more to train in, for who asks for it.
"""

from vitrail.data.words.templates.asked import FOLLOW_UPS, QUESTIONS
from vitrail.data.words.templates.kind import Kind
from vitrail.data.words.templates.many import MANY
from vitrail.data.words.templates.told import CAPTIONS, DRAWINGS, LOOSE, SWAPS

__all__ = ["CAPTIONS", "DRAWINGS", "FOLLOW_UPS", "LOOSE", "MANY", "QUESTIONS", "SWAPS", "Kind"]
