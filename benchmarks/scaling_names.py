"""Who is in the picture of what a batch costs; it is drawn where no peer is installed, too."""

KEYED, SAME = "shardplug, PermutedSampler", "shardplug, accelerate's order"
ACCELERATE, TORCH = "accelerate", "DistributedSampler"
