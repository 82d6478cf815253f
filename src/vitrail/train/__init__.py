"""What turns a model and data into a better model: optimizers, schedules, averages, adapters."""
