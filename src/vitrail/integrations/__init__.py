"""Integrations with evaluation frameworks: lmms-eval and VLMEvalKit. Each module imports its own framework."""
