"""Pure arithmetic: which rank sees which sample, when. No torch, no numpy, no clock."""
