"""Language about scenes: captions, questions and answers, drawing prompts, and preference pairs."""

from vitrail.data.language.answer_balance import BlindBaseline, balance_answers, format_baselines, measure_baselines
from vitrail.data.language.drawing_prompts import (
    DrawingPromptBatch,
    DrawingSpec,
    generate_prompts,
    generate_prompts_for_scenes,
    matches_spec,
)
from vitrail.data.language.qa_batch import QA_KINDS, SceneQABatch
from vitrail.data.language.question_generation import (
    QA_DRAFTERS,
    generate_conversations,
    generate_mixed_questions,
    generate_questions,
    max_question_tokens,
)
from vitrail.data.language.scene_captions import (
    HALLUCINATION_KINDS,
    CaptionPair,
    generate_preference_pairs,
    generate_swap_pairs,
)
from vitrail.data.language.scene_language import SceneLanguage, train_tokenizer
from vitrail.data.language.text_pieces import PieceTable, TokenTable

__all__ = [
    "HALLUCINATION_KINDS",
    "QA_DRAFTERS",
    "QA_KINDS",
    "BlindBaseline",
    "CaptionPair",
    "DrawingPromptBatch",
    "DrawingSpec",
    "PieceTable",
    "SceneLanguage",
    "SceneQABatch",
    "TokenTable",
    "balance_answers",
    "format_baselines",
    "generate_conversations",
    "generate_mixed_questions",
    "generate_preference_pairs",
    "generate_prompts",
    "generate_prompts_for_scenes",
    "generate_questions",
    "generate_swap_pairs",
    "matches_spec",
    "max_question_tokens",
    "measure_baselines",
    "train_tokenizer",
]
