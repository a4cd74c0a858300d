"""shardplug in PyTorch Lightning: each rank reads its own shard, and a checkpoint knows where."""
