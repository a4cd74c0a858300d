"""shardplug in PyTorch-Ignite: each rank reads its own shard, and a checkpoint knows where."""
