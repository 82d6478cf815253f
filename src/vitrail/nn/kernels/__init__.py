"""Fast twins in Triton. Each has a plain twin in torch that it is tested against, and nothing requires Triton."""
