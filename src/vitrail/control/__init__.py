"""World models as environments, and policies that act in them."""

from vitrail.control.imagined_world import ImaginedWorld, WorldRollout

__all__ = ["ImaginedWorld", "WorldRollout"]
