"""WebDataset shards: many samples in few tar files, written once and read in any order by byte offset."""

from vitrail.data.shards.batch_loader import ShuffledDataset, load_batches
from vitrail.data.shards.image_decoding import RandomCrop, decode_image
from vitrail.data.shards.shard_dataset import ShardDataset, ShardReport, ShardsConfig
from vitrail.data.shards.shard_index import ShardFault
from vitrail.data.shards.shard_writer import write_shards

__all__ = [
    "RandomCrop",
    "ShardDataset",
    "ShardFault",
    "ShardReport",
    "ShardsConfig",
    "ShuffledDataset",
    "decode_image",
    "load_batches",
]
__all__ += ["write_shards"]
