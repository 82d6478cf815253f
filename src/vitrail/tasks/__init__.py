"""A model plus its loss: task(batch) → losses."""
