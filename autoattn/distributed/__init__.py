"""One attention over the ranks of a process group: context parallelism."""

from autoattn.distributed.attention import context_attention as context_attention
from autoattn.distributed.shards import position_ids as position_ids
from autoattn.distributed.shards import shard as shard
from autoattn.distributed.shards import unshard as unshard
