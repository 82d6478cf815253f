"""Words about scenes: captions, questions with their answers, prompts to draw, and pairs to prefer."""
