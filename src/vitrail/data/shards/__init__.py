"""WebDataset shards: many samples in few tar files, written once and read in any order by byte offset."""

from vitrail.data.sample_faults import SampleFault, SampleReport
from vitrail.data.shards.batch_loader import ShuffledDataset, load_batches
from vitrail.data.shards.image_decoding import RandomCrop, decode_image
from vitrail.data.shards.shard_dataset import ShardDataset, ShardsConfig
from vitrail.data.shards.shard_writer import write_shards

__all__ = [
    "RandomCrop",
    "SampleFault",
    "SampleReport",
    "ShardDataset",
    "ShardsConfig",
    "ShuffledDataset",
    "decode_image",
    "load_batches",
]
__all__ += ["write_shards"]
