"""Pixels ⇄ codes: quantizers, autoencoders, exact packing, and the container file."""
