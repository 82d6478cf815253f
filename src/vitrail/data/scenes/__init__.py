"""Pictures composed of real sprites, whose truth is known: what is where, in which colour, before or behind what."""
