"""Vision-language systems under one decoder: the table of their scores by kind of question."""
