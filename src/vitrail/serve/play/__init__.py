"""Interactive play of world models: the server, its sessions, and the page in the browser."""

from vitrail.pipelines.controls import ControlMap
from vitrail.pipelines.world import WorldPipeline

__all__ = ["ControlMap", "WorldPipeline"]
