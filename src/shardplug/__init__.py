"""Decide which rank sees which sample, when, in distributed PyTorch training, and keep it true."""
