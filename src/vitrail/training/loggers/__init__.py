"""Loggers: where a training writes its metrics besides log.jsonl, one file each."""
