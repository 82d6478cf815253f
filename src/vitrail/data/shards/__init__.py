"""Many samples in few files: WebDataset tars, written once and read in any order by where each member lies."""

from vitrail.data.shards.decode import RandomCrop, decode_picture
from vitrail.data.shards.index import Fault
from vitrail.data.shards.load import Shuffled, batches
from vitrail.data.shards.read import Report, Shards, ShardsConfig
from vitrail.data.shards.write import write_shards

__all__ = ["Fault", "RandomCrop", "Report", "Shards", "ShardsConfig", "Shuffled", "batches", "decode_picture"]
__all__ += ["write_shards"]
