"""Everything that the language generates about scenes."""

from dataclasses import fields

from vitrail.data.language import (
    QA_DRAFTERS,
    generate_conversations,
    generate_mixed_questions,
    generate_preference_pairs,
    generate_prompts_for_scenes,
    generate_questions,
    generate_swap_pairs,
    matches_spec,
)
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS, SWAP_KINDS


def everything(words, batch, seed):
    """All that can be said of scenes, as one list of tensors."""
    found = [generate_questions(words, batch, seed, kind) for kind in QA_DRAFTERS]
    found += [
        generate_mixed_questions(words, batch, seed, list(QA_DRAFTERS), 5),
        generate_conversations(words, batch, seed),
    ]
    found += [
        generate_preference_pairs(words, batch, seed),
        *(generate_swap_pairs(words, batch, seed, sort) for sort in SWAP_KINDS),
    ]
    drawn = [generate_prompts_for_scenes(words, batch, seed, kind) for kind in DRAWING_PROMPT_KINDS]
    tensors = [getattr(x, f.name) for x in found for f in fields(x)] + [t for p in drawn for t in (p.text, p.valid)]
    return tensors + [matches_spec(words, p.spec, batch) for p in drawn]
