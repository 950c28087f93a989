"""`python -m app benchmark`: what the block, the training step and the data cost."""
