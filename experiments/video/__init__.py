"""Positions and timestamps of videos: tables of scores by kind of question and number of frames, and verdicts."""
